"""`python -m replay_sim`: the command line."""

from replay_sim.cli import main

if __name__ == "__main__":
    main()
