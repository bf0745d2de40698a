"""Ray: training ranks and engines as actors, the controller in the driver, and where they are placed.

`launch` starts a whole job, `launch_fleet` a controller and rollout services; `RayEngine` alone puts an engine actor
behind any client. Ray is imported at first use, in `ray_calls` alone.
"""
