"""The engine side, where transfer, codec and load are put together."""
