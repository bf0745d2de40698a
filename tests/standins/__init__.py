"""Stand-ins that tests share: servers of other projects, processes that can be killed, a loader that fails."""
