"""Ray starts the processes of a job or a fleet, places them, and gives their addresses; they speak HTTP as everywhere.

`launch` starts a whole job, `launch_fleet` a controller and rollout services, `EngineActor.start` an engine alone, in
an actor. Ray is imported at first use, in `ray_calls` alone.
"""
