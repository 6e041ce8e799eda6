from pathlib import Path

from openenv.validation import Level, run_validation, write_report

report = run_validation(Path("maze_env"), max_level=Level.RUNTIME, artifacts_dir=Path("outputs"))
for result in report.results:
    if result.status in ("fail", "error"):
        print(result.check_id, result.evidence, result.remediation)
print(report.verdict.value)
write_report(report, Path("outputs/report.json"))
