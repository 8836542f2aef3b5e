"""Known failures of ranks that lose each other, or never meet."""

from samecurve.diagnose.known_failures.entry import known

_ADDRESS = r" to \(?\[?(?P<host>[^\s,\[\]()]+)\]?(?:, |:)(?P<port>\d+)"

RENDEZVOUS = (
    known(
        "address in use",
        patterns=(
            r"port: (?P<port>\d+)[^\n]*EADDRINUSE",
            r"EADDRINUSE",
            r":(?P<port>\d+) \(errno: 98 - Address already in use",
            r"[Aa]ddress already in use",
        ),
        cause="port {port} is taken: another run on this machine, or one that was not ended",
        remedy=(
            "another --master_port, or none (`samecurve` takes a free one); `ss -ltnp` names who"
            " listens there"
        ),
        again=True,
    ),
    known(
        "master not reached",
        patterns=(
            r"client socket has timed out after (?P<ms>\d+)ms while trying to connect" + _ADDRESS,
            r"client socket has failed to connect to any network address of \((?P<host>[^,\s]+),"
            r" (?P<port>\d+)\)",
        ),
        cause="the first rank was not reached at {host}:{port}",
        remedy=(
            "is it running there, does the name resolve (`getent hosts {host}`), does a firewall"
            " let the port through? MASTER_ADDR, MASTER_PORT"
        ),
        again=True,
        symptom="lost",
    ),
    known(
        "ranks missing",
        patterns=(
            r"Timed out after (?P<seconds>\d+) seconds waiting for clients\."
            r" (?P<here>\d+)/(?P<world>\d+) clients joined",
        ),
        cause="{here} of {world} ranks came within {seconds} s",
        remedy=(
            "start them all: WORLD_SIZE is the number of processes; slow imports over a network"
            " want init_process_group(timeout=...)"
        ),
        again=True,
        symptom="waited",
    ),
    known(
        "a rank came not to the barrier",
        patterns=(r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier in \d+ ms",),
        cause="rank {ranks} did not come to the barrier",
        remedy="its log says where it was; `py-spy dump` shows a live one",
        again=True,
        symptom="waited",
    ),
    known(
        "NCCL watchdog",
        patterns=(
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+),"
            r" OpType=(?P<op>\w+)[^\n]*? ran for (?P<ms>\d+) milliseconds",
        ),
        cause="collective {number} ({op}) did not end within {ms} ms: some rank never came to it",
        remedy=(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL names a rank that calls another one; `py-spy dump`"
            " shows a live one; init_process_group(timeout=...) for long work between steps"
        ),
        again=True,
        symptom="waited",
    ),
    known(
        "NCCL: another rank",
        patterns=(
            r"ncclRemoteError",
            r"NCCL communicator was aborted",
            r"Some NCCL operations have failed or timed out",
        ),
        cause="NCCL lost another rank",
        remedy="that one's log, or its host's terminal, says why",
        again=True,
        symptom="lost",
    ),
    known(
        "NCCL: invalid usage",
        patterns=(
            r"ncclInvalidUsage[\s\S]*?Last error:\s*(?P<what>[^\n]+)",
            r"ncclInvalidUsage",
            r"NCCL error[^\n]*invalid (?:usage|argument)",
        ),
        cause="NCCL was used wrongly ({what})",
        remedy=(
            "NCCL_DEBUG=INFO says more; mostly two ranks on one GPU, or tensors of different sizes"
            " or types: TORCH_DISTRIBUTED_DEBUG=DETAIL"
        ),
    ),
    known(
        "NCCL: system error",
        patterns=(
            r"ncclSystemError[\s\S]*?Last error:\s*(?P<what>[^\n]+)",
            r"ncclSystemError",
            r"unhandled system error",
        ),
        cause="NCCL failed in a call to the system ({what})",
        remedy=(
            "NCCL_DEBUG=INFO says which; NCCL_SOCKET_IFNAME chooses the network, NCCL_IB_DISABLE=1"
            " leaves InfiniBand out; /dev/shm full?"
        ),
        again=True,
    ),
    known(
        "NCCL: CUDA error",
        patterns=(
            r"ncclUnhandledCudaError",
            r"NCCL error[^\n]*unhandled cuda error",
            r"ncclInternalError",
        ),
        cause="NCCL failed in a call to CUDA",
        remedy=(
            "NCCL_DEBUG=INFO says which; NCCL_P2P_DISABLE=1 goes around a broken link between GPUs;"
            " memory full?"
        ),
        again=True,
    ),
    known(
        "a collective timed out",
        patterns=(
            r"Timed out waiting \d+ms for (?P<what>\w+) operation to complete",
            r"wait timeout after \d+ms, keys: (?P<what>[^\n]{1,100})",
            r"Socket Timeout",
            r"DistStoreError: (?P<what>[^\n]*timeout[^\n]*)",
        ),
        cause="another rank did not answer in time ({what})",
        remedy=(
            "its log says where it was; `py-spy dump` shows a live one;"
            " TORCH_DISTRIBUTED_DEBUG=DETAIL names ranks that call different collectives"
        ),
        again=True,
        symptom="waited",
    ),
    known(
        "another rank lost",
        patterns=(
            r"Connection closed by peer",
            r"Connection reset by peer",
            r"Broken pipe",
            r"Connection refused",
            r"remote process exited",
            r"Socket closed",
            r"[Ff]ailed to recv, got 0 bytes",
            r"[Cc]onnection was likely closed",
            r"recvValue(?:WithTimeout)? failed",
            r"sendBytes failed",
        ),
        cause="it lost another rank, or the connection to it",
        remedy=(
            "what ended that one stands in its log, or on its host's terminal; the same command"
            " again goes on from the last save, where there is one"
        ),
        again=True,
        symptom="lost",
    ),
)
