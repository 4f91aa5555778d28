"""Dashboard of training and weights: time of a step, training metrics, and the transfer of versions."""

from rose.pipeline.observability.panels import RATE, Dashboard, Panel, each_mean, mean_and_worst, quantiles

WEIGHTS = Dashboard(
    "weights",
    "ROSE: training and weights",
    [
        Panel(
            "Where a step's time goes",
            "Waiting for a batch says that rollouts are too slow, waiting for the policy that publishing is.",
            "s",
            {
                "waiting for the batch": each_mean("rose_trainer_batch_wait_seconds"),
                "waiting for the policy": each_mean("rose_trainer_policy_wait_seconds"),
                "training": each_mean("rose_trainer_training_seconds"),
                "checkpoint": each_mean("rose_trainer_checkpoint_seconds"),
            },
        ),
        Panel(
            "Reward and success",
            "Of the latest step.",
            "short",
            {"reward": "rose_trainer_reward_mean", "success": "rose_trainer_success_ratio"},
        ),
        Panel(
            "Drift of logprobs",
            "Trainer against engine, a token. It grows with staleness; without any it says that the two compute "
            "different models.",
            "short",
            {
                "KL, nats": "rose_trainer_behaviour_kl_nats",
                "|1 - ratio|": "abs(1 - rose_trainer_importance_mean_ratio)",
            },
        ),
        Panel(
            "Staleness",
            "In versions, of what the latest step was trained on.",
            "short",
            {"mean": "rose_trainer_staleness_versions", "worst": "rose_trainer_staleness_max_versions"},
        ),
        Panel(
            "Gradient",
            "Its norm, the share of clipped tokens, and minibatches of five minutes skipped for not being finite.",
            "short",
            {
                "norm": "rose_trainer_gradient_norm",
                "clipped share": "rose_trainer_clipped_ratio",
                "skipped": "increase(rose_trainer_skipped_minibatches_total[5m])",
            },
        ),
        Panel(
            "Versions behind",
            "Engines, behind the newest on the log: the mean, and the worst.",
            "short",
            mean_and_worst(
                "max by (job) (rose_trainer_policy_version) "
                "- on (job) group_right () (rose_executor_policy_version >= 0)"
            ),
        ),
        Panel(
            "Publishing a version",
            "Encoding and storing its chunks.",
            "s",
            quantiles("rose_weights_publish_seconds"),
        ),
        Panel(
            "Receiving a version",
            "Fetching, decoding and verifying: the mean of all receivers, and that of the slowest.",
            "s",
            mean_and_worst(each_mean("rose_weights_receive_seconds")),
        ),
        Panel(
            "The pause for a version",
            "An engine computes nothing meanwhile.",
            "s",
            mean_and_worst(each_mean("rose_executor_swap_seconds")),
        ),
        Panel(
            "Bytes of weights",
            "Published, what they stand for, and what all receivers read.",
            "Bps",
            {
                "published": f"sum(rate(rose_weights_published_bytes_total[{RATE}]))",
                "stand for": f"sum(rate(rose_weights_dense_bytes_total[{RATE}]))",
                "received": f"sum(rate(rose_weights_received_bytes_total[{RATE}]))",
            },
        ),
        Panel(
            "Versions refused",
            "By reason, and by engines that could not take what was staged. Any is worth a look.",
            "short",
            {
                "{{reason}}": "sum by (reason) (increase(rose_weights_refused_total[5m]))",
                "by the engine": "sum(increase(rose_executor_swaps_refused_total[5m]))",
            },
        ),
    ],
)
