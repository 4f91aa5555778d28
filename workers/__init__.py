"""The programs that do the work: environments, rollout executor, lender, load generator, trainer and weight
transfer.
"""
