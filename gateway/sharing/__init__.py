"""Pages of engines that several gateways use: what each may plan with is claimed on one board."""
