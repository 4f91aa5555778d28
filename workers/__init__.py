"""The worker programs: environments, executor, lender, load generator, trainer and weight transfer."""
