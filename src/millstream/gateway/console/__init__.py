"""The console: pages under `/console`, rendered by the gateway from the operations that commands and the API use."""
