"""The inside of the code sandbox: runs as a script of its own (`python -I -S`), with nothing of ours but this text.

It gives up every right for good, and only then runs the untrusted program. It is *not* trusted afterwards: whatever it reports is the
program's claim, and the expected values are not here. Layers: rlimits, no_new_privs, a user id of its own when told, Landlock (files, TCP,
signals), seccomp (system calls).
"""

import ctypes
import json
import os
import resource
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000

# System calls by name for the two machines that are known; a machine that is not known gets no seccomp and so no sandbox.
_X86 = (
    "socket=41 connect=42 accept=43 sendto=44 sendmsg=46 bind=49 listen=50 socketpair=53 clone=56 fork=57 vfork=58 "
    "execve=59 kill=62 shmget=29 shmat=30 semget=64 msgget=68 ptrace=101 syslog=103 setuid=105 setgid=106 setpgid=109 "
    "setreuid=113 setregid=114 setgroups=116 setresuid=117 setresgid=119 personality=135 setpriority=141 sched_setparam=142 "
    "sched_setscheduler=144 pivot_root=155 prctl=157 adjtimex=159 chroot=161 acct=163 settimeofday=164 mount=165 "
    "umount2=166 swapon=167 swapoff=168 reboot=169 sethostname=170 init_module=175 delete_module=176 quotactl=179 tkill=200 "
    "sched_setaffinity=203 io_setup=206 clock_settime=227 tgkill=234 mbind=237 mq_open=240 kexec_load=246 add_key=248 "
    "request_key=249 keyctl=250 migrate_pages=256 mknodat=259 unshare=272 move_pages=279 perf_event_open=298 "
    "fanotify_init=300 prlimit64=302 name_to_handle_at=303 open_by_handle_at=304 setns=308 process_vm_readv=310 "
    "process_vm_writev=311 kcmp=312 finit_module=313 sched_setattr=314 memfd_create=319 bpf=321 execveat=322 "
    "userfaultfd=323 mknod=133 rt_sigqueueinfo=129 rt_tgsigqueueinfo=297"
)
_ARM = (
    "io_setup=0 umount2=39 mount=40 pivot_root=41 mknodat=33 chroot=51 quotactl=60 acct=89 personality=92 unshare=97 "
    "kexec_load=104 init_module=105 delete_module=106 clock_settime=112 syslog=116 ptrace=117 sched_setparam=118 "
    "sched_setscheduler=119 sched_setaffinity=122 kill=129 tkill=130 tgkill=131 rt_sigqueueinfo=138 setpriority=140 "
    "reboot=142 setregid=143 setgid=144 setreuid=145 setuid=146 setresuid=147 setresgid=149 setpgid=154 setgroups=159 "
    "sethostname=161 prctl=167 settimeofday=170 adjtimex=171 mq_open=180 msgget=186 semget=190 shmget=194 shmat=196 "
    "socket=198 socketpair=199 bind=200 listen=201 accept=202 connect=203 sendto=206 sendmsg=211 add_key=217 "
    "request_key=218 keyctl=219 clone=220 execve=221 swapon=224 swapoff=225 mbind=235 migrate_pages=238 move_pages=239 "
    "rt_tgsigqueueinfo=240 perf_event_open=241 prlimit64=261 fanotify_init=262 name_to_handle_at=264 open_by_handle_at=265 "
    "setns=268 process_vm_readv=270 process_vm_writev=271 kcmp=272 finit_module=273 sched_setattr=274 memfd_create=279 "
    "bpf=280 execveat=281 userfaultfd=282"
)
_MACHINES = {"x86_64": (0xC000003E, _X86), "aarch64": (0xC00000B7, _ARM)}
_NEW = 424  # from here on numbers are the same on all machines; only these newer calls are let through
_NEW_ALLOWED = {436, 437, 439, 441, 449}  # close_range, openat2, faccessat2, epoll_pwait2, futex_waitv
_CLONE3 = 435

LIBC = ctypes.CDLL(None, use_errno=True)


def limit(limits):
    """Bounds that hold in every rung of the ladder."""
    cpu = max(1, -(-int(limits["time_s"] * 1000) // 1000))
    memory = int(limits["mem_mb"]) << 20
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, 16 << 20, 16 << 20),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))


def _bpf(code, jt, jf, k):
    return struct.pack("HBBI", code, jt, jf, k)


def seccomp():
    """Refuse the system calls that lead out: EPERM, or ENOSYS where the C library then takes an older call. Returns whether it holds."""
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        return False
    arch, table = machine
    numbers = {n: int(v) for n, _, v in (e.partition("=") for e in table.split())}
    load, jeq, jge, jset, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000 | EPERM, 0x80000000
    rules = [_bpf(load, 0, 0, 4), _bpf(jeq, 1, 0, arch), _bpf(ret, 0, 0, kill), _bpf(load, 0, 0, 0)]
    rules += [_bpf(jge, 0, 1, 0x40000000), _bpf(ret, 0, 0, deny)]  # the x32 numbers
    rules += [_bpf(jeq, 0, 1, _CLONE3), _bpf(ret, 0, 0, 0x00050000 | ENOSYS)]
    for n in sorted(_NEW_ALLOWED):
        rules += [_bpf(jeq, 0, 1, n), _bpf(ret, 0, 0, allow)]
    rules += [_bpf(jge, 0, 1, _NEW), _bpf(ret, 0, 0, deny)]
    # Threads of this process, yes; processes, no.
    rules += [
        _bpf(jeq, 0, 4, numbers.pop("clone")),
        _bpf(load, 0, 0, 16),
        _bpf(jset, 0, 1, CLONE_THREAD),
        _bpf(ret, 0, 0, allow),
        _bpf(ret, 0, 0, deny),
    ]
    # Its own limits, yes (they can only fall); those of others, no.
    rules += [
        _bpf(jeq, 0, 4, numbers.pop("prlimit64")),
        _bpf(load, 0, 0, 16),
        _bpf(jeq, 0, 1, 0),
        _bpf(ret, 0, 0, allow),
        _bpf(ret, 0, 0, deny),
    ]
    for n in numbers.values():
        rules += [_bpf(jeq, 0, 1, n), _bpf(ret, 0, 0, deny)]
    rules.append(_bpf(ret, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    return LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0


def landlock(readable, writable):
    """Files: read below `readable`, all below `writable`, nothing else; no TCP, no signals to others. Returns the ABI, 0 without."""
    abi = LIBC.syscall(444, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return 0
    files = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    net, scope = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attr = struct.pack("QQQ", files, net, scope)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = LIBC.syscall(444, attr, ctypes.c_size_t(len(attr)), 0)
    if ruleset < 0:
        return 0
    for paths, access in ((readable, 1 << 2 | 1 << 3 | 1 << 0), (writable, files & ~(1 << 0))):
        for path in paths:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            mask = access if os.path.isdir(path) else access & (1 << 0 | 1 << 1 | 1 << 2 | 1 << 14)
            LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", mask & files, fd), 0)
            os.close(fd)
    held = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return abi if held else 0


def enter(job):
    """Give up every right. Returns which layers hold."""
    LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != job["parent"] and job["parent"]:
        os._exit(1)
    limit(job["limits"])
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if job["uid"]:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
        LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    os.chdir(job["scratch"])
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    layers = {"landlock": landlock(job["readable"], [job["scratch"], "/dev/null"]) if job["landlock"] else 0}
    layers["seccomp"] = seccomp()
    return layers


def encode(value, depth=0):
    """A value with its exact types, as JSON can carry it. What is of no plain type is only named."""
    kind = type(value)
    if kind is bool:
        return ["b", int(value)]
    if kind is int:
        return ["i", hex(value)]
    if kind is float:
        return ["f", value.hex()]
    if kind is str:
        return ["s", value]
    if value is None:
        return ["n"]
    if kind is complex:
        return ["c", value.real.hex(), value.imag.hex()]
    if kind in (bytes, bytearray):
        return ["y", value.hex()]
    if depth < 40:
        if kind in (list, tuple, set, frozenset):
            return ["l" if kind is list else "t" if kind is tuple else "e", [encode(v, depth + 1) for v in value]]
        if kind is dict:
            return ["d", [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
    return ["o", kind.__name__]


def main():
    """Read the job, enter the jail, run the program and the steps, and report each."""
    source, report = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(source, "rb") as f:
        job = json.loads(f.read())
    layers = enter(job)
    write, dumps = os.write, json.dumps

    def say(message):
        data = (dumps(message) + "\n").encode()
        while data:
            data = data[write(report, data) :]

    say(["layers", layers])
    scope = {"__name__": "__main__" if job["mode"] == "stdio" else "solution", "__builtins__": __builtins__}
    sys.argv = ["solution.py"]
    if job["mode"] == "stdio":
        os.close(report)
        code = compile(job["code"], "solution.py", "exec")
        del job
        exec(code, scope)
        return
    steps = job["steps"]
    try:
        exec(compile(job["code"], "solution.py", "exec"), scope)
        for kind, source, arguments in steps:
            if kind == "exec":
                exec(compile(source, "test", "exec"), scope)
                value = None
            elif kind == "eval":
                value = eval(compile(source, "test", "eval"), scope)
            else:
                target = eval(compile(source, "test", "eval"), scope)
                value = target(*arguments)
            say(["value", encode(value)])
    except BaseException as e:
        say(["raised", type(e).__name__[:80]])
    say(["end"])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
