"""Dashboard of the bus and the ledger: records, transactions, and the outcomes of opened trajectories."""

from rose.pipeline.observability.panels import RATE, Dashboard, Panel, each_mean, mean_and_worst, quantiles, rate_by

BUS = Dashboard(
    "bus",
    "ROSE: bus and ledger",
    [
        Panel(
            "Records written",
            "By topic, as the broker stored them.",
            "ops",
            rate_by("topic", "rose_bus_written_records_total"),
        ),
        Panel(
            "Records read", "By topic, of all readers together.", "ops", rate_by("topic", "rose_bus_read_records_total")
        ),
        Panel(
            "Dead letters",
            "In five minutes, by topic: `rose dlq list` says which and why.",
            "short",
            {"{{topic}}": "sum by (topic) (increase(rose_bus_dead_letters_total[5m]))"},
        ),
        Panel(
            "Ledger",
            "What became of all that was opened, since these processes began. What is not settled is in flight; "
            "`rose audit` proves it from the log.",
            "short",
            {
                "opened": "sum(rose_environment_trajectories_opened_total)",
                "{{outcome}}": "sum by (outcome) (rose_trainer_outcomes_total)",
            },
        ),
        Panel(
            "Samples",
            "That the trainer read, by what was done with them, and those that wait for their group.",
            "short",
            {
                "{{taken}}": f"sum by (taken) (rate(rose_trainer_samples_total[{RATE}]))",
                "held": "sum(rose_trainer_held_samples)",
            },
        ),
        Panel(
            "Transactions of environment workers",
            "From begin to commit: the mean worker, and the slowest.",
            "s",
            mean_and_worst(each_mean("rose_environment_transaction_seconds")),
        ),
        Panel(
            "Deciding on a batch of records",
            "In the router.",
            "s",
            quantiles("rose_router_batch_seconds"),
        ),
        Panel(
            "Results that did not count",
            "Late and doubled ones are fenced off; those of preempted turns are the router's.",
            "ops",
            {
                "{{reason}}": f"sum by (reason) (rate(rose_environment_results_dropped_total[{RATE}]))",
                "late, router": f"sum(rate(rose_router_late_results_total[{RATE}]))",
                "lost dispatches": f"sum(rate(rose_router_lost_dispatches_total[{RATE}]))",
            },
        ),
        Panel(
            "Recoveries",
            "Times that homes were built again from the log: at each start and whenever they move.",
            "short",
            {"recoveries": "sum(increase(rose_environment_recoveries_total[5m]))"},
        ),
        Panel(
            "Who is there",
            "Homes with an environment worker, and routers that serve: one.",
            "short",
            {"homes": "sum(rose_environment_homes)", "routers": "sum(rose_router_serves)"},
        ),
        Panel(
            "Clocks",
            "How far the clock of an executor is from the router's.",
            "s",
            {"worst": "max(abs(rose_router_clock_behind_seconds))"},
        ),
    ],
)
