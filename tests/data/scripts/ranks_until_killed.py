import sys

from meshwise.runtime.launch import launch
from ranks import sum_of_ranks

if __name__ == "__main__":
    launch(sum_of_ranks, 2, sys.argv[1])
