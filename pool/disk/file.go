package disk

import (
	"errors"
	"fmt"
	"io"
	"unsafe"

	"golang.org/x/sys/unix"
)

// op is an operation on a file, for fault injection.
type op string

const (
	opCreate   op = "create"
	opOpen     op = "open"
	opDirect   op = "direct" // to open past the page cache
	opAllocate op = "allocate"
	opRead     op = "read"
	opWrite    op = "write"
	opTruncate op = "truncate"
	opUnlink   op = "unlink"
)

// faults is called before each op and may fail it. It may write a part of p itself to tear a write,
// or make a read or write short by allowing only the first bytes of p. For opAllocate and
// opTruncate off is the size, and p is nil as for the others.
type faults func(o op, path string, off int64, p []byte) (allow int, err error)

func (f faults) meet(o op, path string, off int64, p []byte) (int, error) {
	if f == nil {
		return len(p), nil
	}
	return f(o, path, off, p)
}

// file is a segment's file. Reads and writes have aligned memory, offsets and lengths.
type file struct {
	fd       int // -1: it could not be opened
	path     string
	readOnly bool
	faults   faults
}

// openFile opens or creates a file with O_DIRECT, or through the page cache where that is not done.
func openFile(path string, flags int, f faults) (*file, error) {
	what := opOpen
	if flags&unix.O_CREAT != 0 {
		what = opCreate
	}
	if _, err := f.meet(what, path, 0, nil); err != nil {
		return nil, fmt.Errorf("disk: %s %s: %w", what, path, err)
	}
	_, err := f.meet(opDirect, path, 0, nil)
	fd := -1
	if err == nil {
		fd, err = retry(func() (int, error) { return unix.Open(path, flags|unix.O_DIRECT|unix.O_CLOEXEC, 0o600) })
	}
	if errors.Is(err, unix.EINVAL) {
		fd, err = retry(func() (int, error) { return unix.Open(path, flags&^unix.O_EXCL|unix.O_CLOEXEC, 0o600) })
	}
	if err != nil {
		return nil, fmt.Errorf("disk: %s %s: %w", what, path, err)
	}
	return &file{fd: fd, path: path, faults: f}, nil
}

func retry(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// readAt fills p or fails.
func (f *file) readAt(p []byte, off int64) error {
	allow, err := f.faults.meet(opRead, f.path, off, p)
	if err != nil {
		return fmt.Errorf("disk: read %s: %w", f.path, err)
	}
	for done := 0; done < len(p); {
		if done >= allow {
			return fmt.Errorf("disk: read %s: %w", f.path, io.ErrUnexpectedEOF)
		}
		n, err := retry(func() (int, error) { return unix.Pread(f.fd, p[done:allow], off+int64(done)) })
		if err == nil && n == 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("disk: read %d bytes at %d of %s: %w", len(p), off, f.path, err)
		}
		done += n
	}
	return nil
}

// writeAt writes all of p or fails; then any part of it may have been written. It continues after a
// short write, from a whole page.
func (f *file) writeAt(p []byte, off int64) error {
	if f.readOnly {
		return fmt.Errorf("disk: write %s: %w", f.path, unix.EROFS)
	}
	for done := 0; done < len(p); {
		allow, err := f.faults.meet(opWrite, f.path, off+int64(done), p[done:])
		n := 0
		if err == nil && allow > 0 {
			n, err = retry(func() (int, error) { return unix.Pwrite(f.fd, p[done:][:allow], off+int64(done)) })
		}
		if n < len(p)-done {
			n -= n % pageBytes
		}
		if err == nil && n == 0 {
			err = io.ErrShortWrite
		}
		if err != nil {
			return fmt.Errorf("disk: write %d bytes at %d of %s: %w", len(p), off, f.path, err)
		}
		done += n
	}
	return nil
}

// do makes a system call for an op, and adds to its error what was attempted.
func (f *file) do(o op, off int64, call func() error) error {
	_, err := f.faults.meet(o, f.path, off, nil)
	if err == nil {
		_, err = retry(func() (int, error) { return 0, call() })
	}
	if err != nil {
		return fmt.Errorf("disk: %s %s: %w", o, f.path, err)
	}
	return nil
}

func (f *file) truncate(size int64) error {
	return f.do(opTruncate, size, func() error { return unix.Ftruncate(f.fd, size) })
}

// allocate reserves the space of the whole file, so that a full disk is found here, not later.
func (f *file) allocate(size int64) error {
	err := f.do(opAllocate, size, func() error { return unix.Fallocate(f.fd, 0, 0, size) })
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return f.truncate(size) // a file system without it reserves space as it is written
	}
	return err
}

// size returns the size of the file, and its space on the disk, in bytes.
func (f *file) size() (size, taken int64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return 0, 0, fmt.Errorf("disk: stat %s: %w", f.path, err)
	}
	return st.Size, st.Blocks * 512, nil
}

func (f *file) close() error {
	if f.fd < 0 {
		return nil
	}
	return unix.Close(f.fd)
}

// hugeBytes is the size of a huge page. A device takes a limited number of physically contiguous
// ranges per request, so one call is many requests from small pages and few from huge ones.
const hugeBytes = 2 << 20

// mapMemory returns n bytes, rounded up to whole pages, off the Go heap and aligned for O_DIRECT.
// From hugeBytes on they are in huge pages, as far as the kernel has any.
func mapMemory(n int64) ([]byte, error) {
	n = roundUp(max(n, 1), pageBytes)
	if n < hugeBytes {
		return mapPages(n)
	}
	n = roundUp(n, hugeBytes)
	p, err := mapPages(n + hugeBytes)
	if err != nil {
		return nil, err
	}
	before := -int64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))) & (hugeBytes - 1)
	_ = unmap(p[:before:before]) // unused memory stays mapped if it cannot be unmapped
	_ = unmap(p[before+n:])
	p = p[before:][:n:n]
	_ = unix.Madvise(p, unix.MADV_HUGEPAGE) // a kernel without huge pages uses small ones
	return p, nil
}

// mapPages returns n bytes, a multiple of pageBytes. Memory is allocated on first access.
func mapPages(n int64) ([]byte, error) {
	p, err := unix.MmapPtr(
		-1, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE,
	)
	if err != nil {
		return nil, fmt.Errorf("disk: %d bytes of memory: %w", n, err)
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// unmap frees what mapMemory or mapPages returned, or whole pages of it.
func unmap(p []byte) error {
	if cap(p) == 0 {
		return nil
	}
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(p)), uintptr(cap(p)))
}

// bounce is a buffer that grows to the requested size. It belongs to one goroutine.
type bounce struct {
	lent []byte // used where it is large enough; its owner unmaps it
	p    []byte
}

func (b *bounce) atLeast(n int64) ([]byte, error) {
	if int64(len(b.lent)) >= n {
		return b.lent[:n], nil
	}
	if int64(len(b.p)) >= n {
		return b.p[:n], nil
	}
	p, err := mapMemory(n)
	if err != nil {
		return nil, err
	}
	b.free()
	b.p = p
	return p[:n], nil
}

func (b *bounce) free() {
	_ = unmap(b.p) // it was mapped by mapMemory
	b.p = nil
}
