"""`python -m services.trainer.replica_main`."""

from common.service import leave, main
from services.trainer.replica import ReplicaService

if __name__ == "__main__":
    leave(main("replica", ReplicaService))
