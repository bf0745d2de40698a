"""Each module of the library has a test beside its name, or a line here that says which test it has instead.

`src/weightsync/net/guard.py` is tested by `tests/unit/net/test_guard.py`, or by several `test_guard_*.py`. The table
`ELSEWHERE` holds the modules whose test has another place, with the reason of each group. A module that is gone, or has
its own test by now, has to leave the table.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
HOUSE = TESTS.parent / "src" / "weightsync"
FEW_LINES = 40
"""Modules of at most so many lines of code (no blanks, comments, docstrings) are tested with what uses them."""

ELSEWHERE = {
    # The face: names that are loaded at their first use.
    "__init__": "unit/test_imports.py",
    "types/__init__": "unit/test_imports.py",
    # Names of the documents: tested by the documents' own code.
    "adapters/gathered": "unit/adapters/test_trl.py",
    "adapters/verl_flush": "unit/adapters/test_verl.py",
    "adapters/compat/weight_manager": "documents/test_document_3.py",
    # What a pool knows of one: tested by what the pool says.
    "control/admission": "unit/control/test_pool.py",
    "control/events": "unit/control/test_state.py",
    "control/instance": "unit/control/test_pool.py",
    "control/locks": "unit/control/test_controller.py",
    # Processes and commands: tested as a user runs them.
    "agent/delta_file": "multiproc/test_pull_kills.py",
    "agent/metrics": "multiproc/test_offload_agent.py",
    "agent/proved": "multiproc/test_pull_delta.py",
    "cli/check": "multiproc/test_cli_serve.py",
    "cli/controller": "unit/cli/test_commands.py",
    "cli/demo": "multiproc/test_demo.py",
    "cli/inspect": "multiproc/test_cli_pull.py",
    "cli/inspect_delta": "multiproc/test_cli_pull.py",
    "cli/pull": "multiproc/test_cli_pull.py",
    "cli/shared": "unit/test_cli.py",
    "cli/status_tables": "unit/cli/test_status.py",
    "cli/write_out": "multiproc/test_out_folder.py",
    "trainer/notifier": "multiproc/test_verbs.py",
    "trainer/push": "multiproc/test_push.py",
    "trainer/push_session": "multiproc/test_push.py",
    "demo/engine": "multiproc/test_demo.py",
    "demo/fleet": "multiproc/test_demo_fleet.py",
    "demo/lora": "multiproc/test_demo_lora.py",
    "demo/lora_engine": "multiproc/test_demo_lora.py",
    "demo/fleet_service": "multiproc/test_demo_fleet.py",
    "demo/fleet_trainer": "multiproc/test_demo_fleet.py",
    "demo/trainer": "multiproc/test_demo.py",
    "trainer/agent_run": "multiproc/test_agent_channel.py",
    "trainer/checks": "multiproc/test_offload.py",
    # Adapters in vLLM: the middleware's parts by its own test, the rest in a real server.
    "engine/vllm/adapter_table": "unit/engine/vllm/test_lora_middleware.py",
    "engine/vllm/answers": "unit/engine/vllm/test_version_middleware.py",
    "engine/vllm/asgi": "unit/engine/vllm/test_lease_middleware.py",
    "engine/vllm/lora_answers": "unit/engine/vllm/test_lora_middleware.py",
    "engine/vllm/lora_calls": "unit/engine/vllm/test_lora_middleware.py",
    "engine/vllm/lora_worker": "engines/test_lora_vllm.py",
    "handles/lora_messages": "unit/engine/vllm/test_lora_middleware.py",
    "handles/lora_engine": "unit/handles/test_vllm_lora.py",
    "engine/sglang_lora/calls": "unit/engine/sglang_lora/test_middleware.py",
    "demo/lora_sglang": "engines/test_demo_lora_sglang.py",
    "demo/lora_vllm": "engines/test_demo_lora_vllm.py",
    "handles/mending": "unit/handles/test_vllm.py",
    "verbs/publishing": "multiproc/test_verbs.py",
    "verbs/pushing": "multiproc/test_verbs.py",
    # Two sides of a socket or of a mapping: tested with the other side in a process of its own.
    "host/puller": "multiproc/test_pull_faults.py",
    "memory/mapped": "multiproc/test_push_ipc_faults.py",
    "transfer/shm": "multiproc/test_pull_faults.py",
    "transfer/tcp": "multiproc/test_pull_tcp.py",
    # Relaying: by hosts and agents of one process, over real sockets.
    "host/renewal": "unit/agent/test_grants_renewal.py",
    "transfer/relay_standing": "unit/transfer/test_relay_pick.py",
    "transfer/relay_work": "unit/transfer/test_relay_pick.py",
    "transfer/tcp_server": "multiproc/test_pull_tcp.py",
    # Trainers' own libraries: several ranks.
    "extract/deepspeed": "multiproc/test_extract_deepspeed.py",
    "extract/fsdp": "multiproc/test_extract_fsdp.py",
    "extract/megatron_export": "multiproc/test_extract_megatron.py",
    # Ray.
    "cluster/controller_actor": "cluster/test_ray_controller.py",
    "cluster/engine_actor": "cluster/test_ray_engine.py",
    "cluster/fleet": "cluster/test_ray_fleet.py",
    "cluster/launch": "cluster/test_ray_launch.py",
    "cluster/manager": "cluster/test_ray_sync.py",
    "cluster/placement": "cluster/test_ray_launch.py",
    "cluster/ranks": "cluster/test_ray_sync.py",
    "cluster/ray_calls": "cluster/test_ray_sync.py",
    "cluster/service_actor": "cluster/test_ray_fleet.py",
    "cluster/trainer_actor": "cluster/test_ray_sync.py",
    "demo/ray_job": "cluster/test_ray_launch.py",
    # A real vLLM, or stand-ins of each of its releases.
    "control/methods/disk_engines": "engines/test_methods_vllm.py",
    "demo/sglang_engine": "engines/test_demo_sglang.py",
    "engine/vllm/peers": "engines/test_vllm_http.py",
    "engine/vllm/plugin": "contract/test_vllm_backend.py",
    "handles/vllm_messages": "unit/handles/test_vllm.py",
    "load/vllm_checkpoint": "unit/load/test_vllm.py",
    "load/live_trace": "unit/load/test_live_plan.py",
    "load/patch_bracket": "unit/load/test_patching.py",
    # The documents' own code runs them.
    "adapters/compat/engines": "unit/adapters/compat/test_loaders.py",
    "adapters/compat/extractors": "documents/test_document_1.py",
    "adapters/compat/messages": "documents/test_document_1.py",
    "adapters/compat/receiver": "documents/test_document_1.py",
    "adapters/compat/sender": "documents/test_document_2.py",
    "adapters/compat/skyrl": "documents/test_document_2.py",
    "adapters/compat/strategy": "documents/test_document_2.py",
    # A GPU; what of it runs on a CPU is tested there.
    "transfer/ipc_cuda": "gpu/test_cuda_ipc.py",
    # The contract suites are tests themselves.
    "testing/contracts/client": "contract/test_client_contract.py",
    "testing/contracts/codec": "contract/test_codec_contract.py",
    "testing/contracts/extractor": "contract/test_extractor_contract.py",
    "testing/contracts/loader": "contract/test_loader_contract.py",
    "testing/contracts/loader_patches": "contract/test_loader_contract.py",
    "testing/contracts/served": "contract/test_codec_contract.py",
    "testing/contracts/transfer": "contract/test_transfer_contract.py",
    # Several hosts: network namespaces, which need root.
    "testing/host_reaper": "hosts/test_bench.py",
    "testing/hosts": "hosts/test_bench.py",
    "testing/namespaces": "hosts/test_bench.py",
    # A part of a neighbour, behind whose face it is tested.
    "_config_foreign": "unit/test_config.py",
    "_config_problems": "unit/test_config.py",
    "_config_reads": "unit/test_config_keys.py",
    "cli/export": "multiproc/test_store.py",
    "cli/fetch": "multiproc/test_store.py",
    "clients/store": "unit/clients/test_chain.py",
    "sink/claim": "unit/sink/test_writer.py",
    "types/store": "unit/clients/test_chain.py",
    "types/sink": "multiproc/test_store.py",
    "verbs/storing": "multiproc/test_store.py",
    "clients/gate": "engines/test_gate.py",
    "types/method": "unit/types/test_report.py",
    "control/callers_run": "unit/control/test_server_fleet.py",
    "types/push_orders": "unit/control/test_push_orders.py",
    "verbs/order_taker": "multiproc/test_push_orders.py",
    "agent/prover": "unit/agent/test_api.py",
    "clients/async_controller": "unit/handles/test_hostile_servers.py",
    "codec/base": "unit/codec/test_full.py",
    "codec/delta_format": "unit/codec/test_delta_damage.py",
    "codec/delta_intrinsics": "unit/codec/test_delta_cases.py",
    "codec/delta_kernels": "unit/codec/test_delta_damage.py",
    "codec/delta_planes": "unit/codec/test_delta.py",
    "codec/delta_reader": "unit/codec/test_delta.py",
    "codec/delta_units": "unit/codec/test_delta_cases.py",
    "codec/kernels": "unit/codec/test_digest_accidents.py",
    "codec/patch": "unit/codec/test_changes.py",
    "control/build": "unit/control/methods/test_select.py",
    "control/methods/claims": "unit/control/methods/test_fleet.py",
    "control/methods/instance_calls": "unit/control/methods/test_fleet.py",
    "control/model": "unit/control/test_controller.py",
    "control/methods/hosted": "unit/control/methods/test_tinker.py",
    "control/web/page": "unit/control/web/test_headline.py",
    "engine/audit": "unit/engine/test_worker_patches.py",
    "engine/membership": "unit/engine/test_worker.py",
    "engine/proof": "unit/engine/test_worker.py",
    "engine/session": "unit/engine/test_worker.py",
    "extract/base": "unit/extract/test_module.py",
    "extract/registry": "unit/extract/test_megatron_bridge.py",
    "handles/stepped": "unit/handles/test_sglang_engine.py",
    "handles/sglang_api": "unit/handles/test_sglang.py",
    "handles/sglang_messages": "unit/handles/test_sglang.py",
    "host/agent_state": "unit/host/test_followed.py",
    "host/delta_pull": "unit/host/test_delta_apply.py",
    "host/fleet_model": "multiproc/test_fleet.py",
    "host/model_updater": "unit/host/test_service.py",
    "host/progress": "multiproc/test_pull_slow.py",
    "host/settings": "unit/host/test_service.py",
    "host/staged_requests": "unit/engine/test_embedded_patches.py",
    "load/patch_kernels": "unit/load/test_patching.py",
    "load/base": "contract/test_loader_contract.py",
    "memory/host": "multiproc/test_local_user.py",
    "memory/owned": "multiproc/test_local_user.py",
    "net/client": "unit/handles/test_hostile_servers.py",
    "net/exchange": "unit/handles/test_hostile_servers.py",
    "net/http_edge": "unit/handles/test_http.py",
    "net/protocol": "unit/net/test_door.py",
    "observe/lanes": "unit/observe/test_timeline.py",
    "observe/palette": "unit/observe/test_picture.py",
    "trainer/segment_writer": "unit/trainer/test_plan_cache.py",
    "trainer/spare": "unit/trainer/test_buffer.py",
    "transfer/base": "contract/test_transfer_contract.py",
    "transfer/group": "unit/transfer/test_native.py",
    "transfer/ipc_copy": "unit/transfer/test_ipc.py",
    "transfer/ipc_handles": "unit/transfer/test_ipc.py",
    "transfer/ipc_receive": "unit/transfer/test_ipc.py",
    "transfer/sglang": "unit/handles/test_sglang_engine.py",
    "types/control": "unit/types/test_messages.py",
    "types/engine": "unit/types/test_report.py",
    "types/process": "multiproc/test_forks.py",
    "types/service": "unit/types/test_messages.py",
    "types/table": "unit/codec/test_runs.py",
    "types/transfer_messages": "unit/types/test_messages.py",
}

OF_SEVERAL = {
    "cli/test_commands.py": "every command",
    "handles/test_hostile_servers.py": "every HTTP client",
    "test_bench_control.py": "that bench/ runs",
    "test_bench_delta.py": "what bench/ trains",
    "test_docs_releases.py": "the tables of releases in docs/",
    "test_imports.py": "the whole library",
    "test_mirror.py": "the whole library",
    "test_rooms.py": "the whole library",
    "types/test_first_use.py": "all messages",
    "types/test_ids.py": "all names and ids",
    "types/test_messages.py": "all messages",
    "types/test_report.py": "reports of both paths",
}
"""Unit tests that are of no one module, and of what they are."""


def num_lines(file: Path) -> int:
    """Lines of code: no blanks, no comments, no docstrings."""
    text = file.read_text(encoding="utf-8")
    words = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(words)


MODULES = {str(file.relative_to(HOUSE).with_suffix("")): file for file in sorted(HOUSE.rglob("*.py"))}


def own_tests(module: str) -> set[Path]:
    folder, _, name = module.removesuffix("/__init__").rpartition("/")
    return {
        file
        for file in (TESTS / "unit" / folder).glob(f"test_{name}*.py")
        if file.stem == f"test_{name}" or file.stem.startswith(f"test_{name}_")
    }


def test_every_module_has_its_test() -> None:
    """Seen red without one of the lines above, and with a new module of 50 lines."""
    large = {name for name, file in MODULES.items() if num_lines(file) > FEW_LINES}
    without = sorted(name for name in large - ELSEWHERE.keys() if not own_tests(name))
    assert not without, "write tests/unit/<path>/test_<module>.py, or say in ELSEWHERE where they are tested"


def test_the_table_has_no_line_too_many() -> None:
    gone = sorted(ELSEWHERE.keys() - MODULES.keys())
    assert not gone, "these modules are gone"
    at_home = sorted(name for name in ELSEWHERE if own_tests(name))
    assert not at_home, "these have their own test"
    lost = sorted({test for test in ELSEWHERE.values() if not (TESTS / test).is_file()})
    assert not lost, "these tests are gone"


def test_every_unit_test_has_its_module() -> None:
    """Seen red with a test moved into another folder."""
    claimed = {test for name in MODULES for test in own_tests(name)}
    stray = {
        str(file.relative_to(TESTS / "unit")) for file in (TESTS / "unit").rglob("test_*.py") if file not in claimed
    }
    assert stray == OF_SEVERAL.keys()
