// Package peercred asks the kernel who the peer of a Unix socket is, and for a descriptor of its
// process.
package peercred

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Cred identifies a peer at the time of its connection. Pid is 0 if its PID namespace is not
// visible from here.
type Cred struct {
	Pid int
	Uid uint32
	Gid uint32
	// Groups are the supplementary groups; nil if the kernel does not report them.
	Groups []uint32
}

// Socket options for which x/sys/unix has no readers (linux/include/uapi/asm-generic/socket.h).
const (
	soPeerGroups = 59
	soPeerPidFD  = 77
	maxGroups    = 65536 // NGROUPS_MAX
)

// InGroups reports whether one of the peer's groups is in gids.
func (c *Cred) InGroups(gids []uint32) bool {
	if slices.Contains(gids, c.Gid) {
		return true
	}
	return slices.ContainsFunc(c.Groups, func(g uint32) bool { return slices.Contains(gids, g) })
}

// Identify asks the kernel for the peer's identity and a descriptor of its process, -1 if there is
// none. exited reports that the process has already ended.
func Identify(uc *net.UnixConn) (cred Cred, pidfd int, exited bool, err error) {
	raw, err := uc.SyscallConn()
	if err != nil {
		return cred, -1, false, err
	}
	pidfd = -1
	var failed error
	err = raw.Control(func(fd uintptr) {
		var u *unix.Ucred
		if u, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); failed != nil {
			return
		}
		cred = Cred{Pid: int(u.Pid), Uid: u.Uid, Gid: u.Gid, Groups: peerGroups(int(fd))}
		pidfd, exited = peerPidFD(int(fd), cred.Pid)
	})
	return cred, pidfd, exited, errors.Join(err, failed)
}

func peerGroups(fd int) []uint32 {
	buf := make([]byte, maxGroups*4)
	n, err := getsockopt(fd, soPeerGroups, buf)
	if err != nil {
		return nil
	}
	groups := make([]uint32, n/4)
	for i := range groups {
		groups[i] = binary.NativeEndian.Uint32(buf[4*i:])
	}
	return groups
}

// peerPidFD prefers the kernel's own descriptor (Linux 6.5), because the pid may have been reused.
func peerPidFD(fd, pid int) (pidfd int, exited bool) {
	var b [4]byte
	switch _, err := getsockopt(fd, soPeerPidFD, b[:]); {
	case err == nil:
		pidfd = int(int32(binary.NativeEndian.Uint32(b[:])))
		unix.CloseOnExec(pidfd)
		return pidfd, false
	case errors.Is(err, unix.ESRCH):
		return -1, true
	}
	if pid <= 0 {
		return -1, false
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, errors.Is(err, unix.ESRCH)
	}
	return pidfd, false
}

// Watchable returns a file for a pidfd that the runtime's poller can wait for; nil if it cannot.
func Watchable(pidfd int) *os.File {
	if pidfd < 0 {
		return nil
	}
	if unix.SetNonblock(pidfd, true) != nil {
		unix.Close(pidfd)
		return nil
	}
	return os.NewFile(uintptr(pidfd), "pidfd")
}

// getsockopt reads a socket option as bytes, which x/sys/unix supports only for strings, and
// returns their number.
func getsockopt(fd, option int, buf []byte) (int, error) {
	n := uint32(len(buf))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, uintptr(option),
		uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
