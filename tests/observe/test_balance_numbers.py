"""Expert loads in metrics.jsonl."""

from ndtrain.train import main
from tests.lib.helpers import arguments, rows, write_corpus


def test_metrics_jsonl_has_load_of_every_moe_layer(tmp_path, capsys):
    run = tmp_path / "run"
    experts = ["model=moe_debug", "moe.z_loss=0.01", "moe.aux_coef=0.01", "train.steps=2", "optim.warmup=1"]
    assert main(arguments(run, write_corpus(tmp_path / "corpus.txt"), *experts)) == 0
    first, second = rows(run)
    assert second["aux_loss"] > 1 and second["z_loss"] > 4  # the square of log 8 where all logits are 0
    largest = []
    for i in range(2):
        load, entropy, dropped, bias_range = (
            second[f"moe/layer_{i}/{name}"] for name in ("load_max_over_mean", "load_entropy", "dropped", "bias_range")
        )
        largest.append(load)
        assert 1 <= load <= 4 and 0 < entropy < 1 and dropped == 0
        assert 0 < first[f"moe/layer_{i}/bias_range"] <= 0.002001 and 0 < bias_range <= 0.004001
    assert second["moe/load_max_over_mean"] == max(largest)
    assert f"load {max(largest):.2f}" in capsys.readouterr().out
