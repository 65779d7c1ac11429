"""Where the bytes of a batch live: the mapping, its slots, their leases, and how many there may be."""
