"""vLLM's side: the plug-in and the middleware that vLLM loads."""
