package dram

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// arena is the memory the slots lie in.
type arena struct {
	base      []byte
	raw       []byte // base, to whole pages
	fd        int
	pageBytes int64
	reason    string // why not huge pages
}

func openArena(o *Options) (arena, error) {
	if o.Virtual {
		return virtualArena(o.Bytes)
	}
	a, reason := hugeArena(o)
	if reason == "" {
		return a, nil
	}
	if err := checkMemory(o.Bytes, systemFiles); err != nil {
		return arena{}, err
	}
	a, err := mapMemfd(o.Bytes, pageBytes, unix.MFD_CLOEXEC)
	a.reason = reason
	return a, err
}

// hugeArena maps huge pages, which the kernel reserves at once, or says why not.
func hugeArena(o *Options) (arena, string) {
	if o.HugePages == Off {
		return arena{}, "switched off"
	}
	free, err := freeHugePages(systemFiles)
	if err != nil {
		return arena{}, err.Error()
	}
	need := (o.Bytes + hugeBytes - 1) / hugeBytes
	if free < need {
		return arena{}, fmt.Sprintf("%d pages of 2 MiB needed, %d free", need, free)
	}
	a, err := mapMemfd(o.Bytes, hugeBytes, unix.MFD_CLOEXEC|unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
	if err != nil {
		return arena{}, err.Error()
	}
	return a, ""
}

func mapMemfd(bytes, page int64, flags int) (arena, error) {
	size := (bytes + page - 1) &^ (page - 1)
	fd, err := unix.MemfdCreate("kvagent-pool", flags)
	if err != nil {
		return arena{}, fmt.Errorf("dram: memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		return arena{}, errors.Join(fmt.Errorf("dram: arena of %d bytes: %w", size, err), unix.Close(fd))
	}
	a, err := mapArena(fd, bytes, page)
	if err != nil {
		return arena{}, errors.Join(err, unix.Close(fd))
	}
	return a, nil
}

// mapArena maps the first bytes of a file, to whole pages.
func mapArena(fd int, bytes, page int64) (arena, error) {
	size := roundUp(bytes, page)
	raw, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return arena{}, fmt.Errorf("dram: map arena of %d bytes: %w", size, err)
	}
	return arena{base: raw[:bytes:bytes], raw: raw, fd: fd, pageBytes: page}, nil
}

func virtualArena(bytes int64) (arena, error) {
	raw, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return arena{}, fmt.Errorf("dram: reserve %d bytes of address space: %w", bytes, err)
	}
	return arena{base: raw, raw: raw, fd: -1, pageBytes: pageBytes, reason: "virtual"}, nil
}

func (a *arena) close() error {
	err := unix.Munmap(a.raw)
	if a.fd >= 0 {
		err = errors.Join(err, unix.Close(a.fd))
	}
	return err
}
