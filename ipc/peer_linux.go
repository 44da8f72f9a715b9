package ipc

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// getsockopt reads a socket option as bytes, which x/sys/unix has only for strings, and gives how many.
func getsockopt(fd, option int, buf []byte) (int, error) {
	n := uint32(len(buf))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, uintptr(option),
		uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
