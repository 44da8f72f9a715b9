package disk

import (
	"errors"
	"fmt"
	"io"
	"math"

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
	opSync     op = "sync"
	opUnlink   op = "unlink"
	opQueue    op = "queue"  // to get a queue of asynchronous reads
	opSubmit   op = "submit" // to put a read into it
	opReap     op = "reap"   // to take what has ended out of it
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
	fd       int
	path     string
	direct   bool // past the page cache
	align    int64
	readOnly bool
	faults   faults
}

// openFile opens or creates a file with O_DIRECT, or through the page cache if the file system
// cannot do that.
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
	direct := err == nil
	if errors.Is(err, unix.EINVAL) {
		fd, err = retry(func() (int, error) { return unix.Open(path, flags&^unix.O_EXCL|unix.O_CLOEXEC, 0o600) })
	}
	if err != nil {
		return nil, fmt.Errorf("disk: %s %s: %w", what, path, err)
	}
	return &file{fd: fd, path: path, direct: direct, align: readAlign(fd, direct), faults: f}, nil
}

// readAlign returns the unit of offsets and lengths of reads.
func readAlign(fd int, direct bool) int64 {
	var st unix.Statx_t
	if !direct {
		return 1
	}
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if n := int64(st.Dio_offset_align); err == nil && st.Mask&unix.STATX_DIOALIGN != 0 && n > 0 && n <= pageBytes &&
		pageBytes%n == 0 {
		return n
	}
	return pageBytes
}

func retry(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// ioFunc reads or writes a part of a file, as pread(2) and pwrite(2) do.
type ioFunc func(f *file, p []byte, off int64) (n int, err error)

func pread(f *file, p []byte, off int64) (int, error) {
	return retry(func() (int, error) { return unix.Pread(f.fd, p, off) })
}

func pwrite(f *file, p []byte, off int64) (int, error) {
	return retry(func() (int, error) { return unix.Pwrite(f.fd, p, off) })
}

// readAt fills p or fails. It blocks the thread.
func (f *file) readAt(p []byte, off int64) error { return f.fill(pread, p, off) }

// fill fills p by an ioFunc, or fails.
func (f *file) fill(how ioFunc, p []byte, off int64) error {
	allow, err := f.faults.meet(opRead, f.path, off, p)
	if err != nil {
		return fmt.Errorf("disk: read %s: %w", f.path, err)
	}
	for done := 0; done < len(p); {
		if done >= allow {
			return fmt.Errorf("disk: read %s: %w", f.path, io.ErrUnexpectedEOF)
		}
		n, err := how(f, p[done:allow], off+int64(done))
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
// short write. It blocks the thread.
func (f *file) writeAt(p []byte, off int64) error { return f.put(pwrite, p, off) }

// put writes all of p by an ioFunc, as writeAt does.
func (f *file) put(how ioFunc, p []byte, off int64) error {
	if f.readOnly {
		return fmt.Errorf("disk: write %s: %w", f.path, unix.EROFS)
	}
	for done := 0; done < len(p); {
		n, err := f.writeSome(how, p[done:], off+int64(done))
		if err == nil && n == 0 {
			err = io.ErrShortWrite
		}
		if err != nil {
			return fmt.Errorf("disk: write %d bytes at %d of %s: %w", len(p), off, f.path, err)
		}
		if done += n; f.direct && n%pageBytes != 0 {
			done -= n % pageBytes // the next one must be aligned too
			if n < pageBytes {
				return fmt.Errorf("disk: write %d bytes at %d of %s: %w", len(p), off, f.path, io.ErrShortWrite)
			}
		}
	}
	return nil
}

func (f *file) writeSome(how ioFunc, p []byte, off int64) (int, error) {
	allow, err := f.faults.meet(opWrite, f.path, off, p)
	if err != nil || allow == 0 {
		return 0, err
	}
	return how(f, p[:allow], off)
}

func (f *file) truncate(size int64) error {
	if _, err := f.faults.meet(opTruncate, f.path, size, nil); err != nil {
		return fmt.Errorf("disk: truncate %s: %w", f.path, err)
	}
	if err := unix.Ftruncate(f.fd, size); err != nil {
		return fmt.Errorf("disk: truncate %s: %w", f.path, err)
	}
	return nil
}

// allocate reserves the space of the whole file, so that a full disk is found here and not in the
// middle of a segment.
func (f *file) allocate(size int64) error {
	_, err := f.faults.meet(opAllocate, f.path, size, nil)
	if err == nil {
		_, err = retry(func() (int, error) { return 0, unix.Fallocate(f.fd, 0, 0, size) })
	}
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return f.truncate(size) // a file system without it reserves space as it is written
	}
	if err != nil {
		return fmt.Errorf("disk: allocate %d bytes for %s: %w", size, f.path, err)
	}
	return nil
}

// punch frees the whole pages within a range. If the file system cannot do that, they stay until
// the segment is dropped.
func (f *file) punch(off, n int64) {
	from, to := roundUp(off, pageBytes), (off+n)/pageBytes*pageBytes
	if from < to {
		_ = unix.Fallocate(f.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, to-from)
	}
}

func (f *file) sync() error {
	if _, err := f.faults.meet(opSync, f.path, 0, nil); err != nil {
		return fmt.Errorf("disk: sync %s: %w", f.path, err)
	}
	if _, err := retry(func() (int, error) { return 0, unix.Fdatasync(f.fd) }); err != nil {
		return fmt.Errorf("disk: sync %s: %w", f.path, err)
	}
	return nil
}

// size returns the size of the file, and its space on the disk, in bytes.
func (f *file) size() (size, taken int64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return 0, 0, fmt.Errorf("disk: stat %s: %w", f.path, err)
	}
	return st.Size, st.Blocks * 512, nil
}

// nextData returns the next page from off on that was written, if the file system knows.
func (f *file) nextData(off int64) int64 {
	if off%pageBytes != 0 {
		return off
	}
	data, err := unix.Seek(f.fd, off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return math.MaxInt64 - headerBytes // nothing after it
	}
	if err != nil || data < off {
		return off
	}
	return data / pageBytes * pageBytes
}

func (f *file) close() error { return unix.Close(f.fd) }
