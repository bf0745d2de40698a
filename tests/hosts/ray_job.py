"""The driver of a job on Ray's nodes, one a host: starts a trainer's ranks and engines there, and pushes versions.

Writes a line of JSON: what each actor's node is, and of each version what the engines have proved and serve.
"""

from __future__ import annotations

import json
import sys
from urllib.parse import urlsplit

CALL_S = 60.0
VERSIONS = (1, 2)
TRANSFER = {"transfer_timeout_s": 40.0, "join_timeout_s": 30.0, "pause_timeout_s": 5.0}


def main(address: str) -> None:
    """`address`: of Ray's head, host:port."""
    import ray

    from tests.cluster.actors import Rollout, Trainer, expected
    from weightsync.cluster.launch import launch
    from weightsync.cluster.placement import Placement

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    placement = Placement(rank_cpus=1, engine_cpus=1, spread="SPREAD")
    config = {"transfer": TRANSFER, "extract": {"dtype": "bfloat16"}}
    try:
        with launch(
            Trainer, Rollout, num_ranks=2, num_engines=2, config=config, placement=placement, start_timeout_s=120.0
        ) as sync:
            sync.initialize()
            nodes = [rank.ready(timeout_s=CALL_S).node_ip for rank in sync.ranks]
            urls = [engine.address(timeout_s=CALL_S).url for engine in sync.engines.values()]
            served = []
            for version in VERSIONS:
                sync.run("step", timeout_s=CALL_S)
                report = sync.sync_weights(version)
                assert report.digests_equal is True
                for engine in sync.engines.values():
                    live, number, _ = engine.ask("fingerprint", timeout_s=CALL_S)
                    assert live == expected(version)
                    served.append(number)
            said = {"ranks": nodes, "engines": [urlsplit(url).hostname for url in urls], "served": served}
            sys.stdout.write(json.dumps(said) + "\n")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
