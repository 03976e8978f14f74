"""`python -m agentserve` is the command `agentserve`."""

from agentserve.cli.main import main

if __name__ == "__main__":
    main()
