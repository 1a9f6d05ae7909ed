"""The trainers. Each is a generator: `for record in grpo.train(cfg)` yields one metrics record a step."""
