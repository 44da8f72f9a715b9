package mooncake

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// newMemory maps zeroed memory that can be shared.
func newMemory(bytes int64) (Memory, error) {
	fd, err := unix.MemfdCreate("kvagent-mooncake", unix.MFD_CLOEXEC)
	if err != nil {
		return Memory{}, fmt.Errorf("mooncake: bounce memory: memfd: %w", err)
	}
	if err = unix.Ftruncate(fd, bytes); err == nil {
		var base []byte
		if base, err = unix.Mmap(fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			return Memory{Base: base, FD: fd}, nil
		}
	}
	return Memory{}, errors.Join(fmt.Errorf("mooncake: bounce memory of %d bytes: %w", bytes, err), unix.Close(fd))
}

func (m *Memory) close() error { return errors.Join(unix.Munmap(m.Base), unix.Close(m.FD)) }

// offset returns where data is in the memory, if all of it is.
func (m *Memory) offset(data []byte) (int64, bool) {
	if len(data) == 0 || len(data) > len(m.Base) {
		return 0, false
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(data)))
	base := uintptr(unsafe.Pointer(unsafe.SliceData(m.Base)))
	if at < base || at-base > uintptr(len(m.Base)-len(data)) {
		return 0, false
	}
	return int64(at - base), true
}

// hostName returns the name of this node if none was given.
func (s *Store) hostName() (string, error) {
	if s.o.Host != "" {
		return s.o.Host, nil
	}
	return os.Hostname()
}
