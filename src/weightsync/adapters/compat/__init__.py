"""The names that design documents of weight sync use, over ours: who has one of these in hand finds each name.

`skyrl` has the interfaces of SkyRL's design, migration plan and call graph, `weight_manager` and `dataflow` the names
of the weight manager's document, `controller` those of the weight sync controller's. `docs/documents.md` lists every
name, and where ours does otherwise, and why; design/0027 says how they lie over ours.
"""
