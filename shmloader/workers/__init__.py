"""Who fills the slots: the protocol, the worker's body, and the crew that the main process keeps."""
