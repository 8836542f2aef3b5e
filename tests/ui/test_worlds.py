"""The speed on 1 to N devices beside the form: predicted, measured, or a text that says why not."""

import json
from dataclasses import replace
from pathlib import Path

from commands import write_config
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.core.planning.machine import Device, Machine
from samecurve.core.planning.planner import plan
from samecurve.run.prepare import make_plan
from samecurve.tasks import Tasks
from samecurve_products.page.form.worlds import find_measured, world_blocks


def test_speed_on_more_devices_is_predicted_or_measured(tmp_path: Path, corpus: Path) -> None:
    root, file = tmp_path, write_config(tmp_path, corpus)
    loaded = load_document(read_document(file), Tasks(), "tiny")
    config = loaded.config.with_values(train={"precision": "bf16"})
    _, facts = make_plan(replace(loaded, config=config.with_values(devices={"use": "cpu"})))
    gpus = tuple(
        Device(kind="cuda", index=n, name="NVIDIA H100 80GB HBM3", memory=80 << 30)
        for n in range(4)
    )
    machine = Machine(devices=gpus, links=(), host_bytes=1 << 38, cores=32)
    chosen = plan(config, machine, facts)
    measured = find_measured("tiny", root, ["-f", "tiny.yaml"], gpus[0].name)
    table, source = world_blocks(config, machine, facts, chosen, measured=measured)
    assert len(table["rows"]) == 3
    assert all(row[4] and row[5] and row[6] for row in table["rows"])
    assert "Predicted" in source["text"]
    assert "samecurve bench -f tiny.yaml" in source["text"]

    here = Machine(devices=(), links=(), host_bytes=1 << 34, cores=2, cpu="A CPU")
    on_cpu = config.with_values(devices={"use": "cpu:2"}, train={"precision": "f32"})
    chosen = plan(on_cpu, here, facts)
    nothing = world_blocks(on_cpu, here, facts, chosen, measured=measured)
    assert nothing[0]["head"] == ["Devices", "Strategy", "Batch", "Memory a device"]
    assert "can't be predicted" in nothing[1]["text"]
    rows = [{"world": n, "seconds_per_step": 0.1 / n, "speedup": float(n)} for n in (1, 2)]
    (root / "bench" / "tiny-1").mkdir(parents=True)
    bench = {"config": "tiny", "device": "A CPU", "layouts": rows}
    (root / "bench" / "tiny-1" / "bench.json").write_text(json.dumps(bench))
    measured = find_measured("tiny", root, ["-f", "tiny.yaml"], "A CPU")
    table, source = world_blocks(on_cpu, here, facts, chosen, measured=measured)
    assert [row[4] for row in table["rows"]] == ["100 ms", "50 ms"]
    assert [row[6] for row in table["rows"]] == ["1.00", "2.00"]
    assert "Measured on A CPU" in source["text"]
