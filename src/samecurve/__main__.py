from samecurve.cli.entry import run

run()
