from openenv.testing import Cheat, run_cheats

mine = Cheat("exit-code", "exits as a check would", ("echo '2 passed'; exit 0",))
report = run_cheats("local", cheats=[mine])
print([(result.name, result.kind, result.reward) for result in report.results])
