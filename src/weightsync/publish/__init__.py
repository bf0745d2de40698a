"""The trainer side, where extract, codec and transfer are put together."""
