"""`record_trace`: what a real engine's traffic looks like on disk."""

from __future__ import annotations

from vllm_harness import Prompts

from kvtier.sim.traces import read_trace

new_prompt = Prompts(seed=12)


def test_the_traffic_is_recorded_without_tokens(dense, start_engine, tmp_path):
    path = tmp_path / "traffic.jsonl"
    engine = start_engine(dense, settings={"record_trace": str(path)})
    prompt, other = new_prompt(600), new_prompt(70)
    for tokens in (prompt, prompt, prompt[:512] + new_prompt(88), other):
        engine.ask(tokens)
    engine.abort(engine.submit(new_prompt(100)))
    engine.connector._recording.close()
    requests = read_trace(path).requests
    assert [request.input_length for request in requests[:4]] == [600, 600, 600, 70]
    assert [request.output_length for request in requests[:4]] == [4, 4, 4, 4]
    first, again, branch, last = (request.hash_ids for request in requests[:4])
    assert first == again
    assert first[0] == branch[0]
    assert first[1] != branch[1]
    assert len({*first, *branch, *last}) == 4
    for tokens in (prompt, other):
        assert ", ".join(map(str, tokens[:3])) not in path.read_text()


def test_an_earlier_recording_is_kept(dense, start_engine, tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.write_text("mine\n")
    engine = start_engine(dense, settings={"record_trace": str(path)})
    engine.ask(new_prompt(40))
    engine.connector._recording.close()
    assert path.read_text() == "mine\n"
    assert len(read_trace(tmp_path / "traffic-2.jsonl").requests) == 1
