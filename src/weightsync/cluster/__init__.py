"""Ray: training and engine actors, their clients, and where they are placed."""
