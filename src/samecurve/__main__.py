from samecurve.cli.main import main

main()
