"""Our plug-in in a server of SGLang: LoRA adapters, each version under a name of its own."""
