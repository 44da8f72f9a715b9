package dram

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// file is where a pool is kept that outlives its process: on tmpfs or hugetlbfs, so that it costs nothing but the memory that
// the pool has anyway. Its methods do nothing on a nil one, and are called with the pool's lock held unless they say otherwise.
//
// What must be true after the process is killed at any moment is brought about by the order of stores, each to a word that the
// processor writes in one piece: the kernel keeps the pages, and whoever maps them next sees every store that was executed. There is
// no fsync, because nothing of this outlives the machine.
type file struct {
	path  string
	super superblock
	meta  []byte // from the headers on to the end
	whole []byte // superblock
	fd    int

	headers []header // all there can be; those below usable may be touched
	usable  int
	tick    uint32        // of the last store or load
	refused uint64        // times something could not grow because the file system had no room
	faults  atomic.Uint64 // times that a page after the arena faulted
}

// tickLength is the unit of the clock in headers.
const tickLength = 100 * time.Millisecond

// openFile takes the file of a pool, made if it is not there, and maps it.
func openFile(o *Options) (f *file, a arena, r *Recovery, err error) {
	fd, made, err := lockPath(o.Path)
	if err != nil {
		return nil, arena{}, nil, err
	}
	defer func() {
		if err != nil && made {
			_ = os.Remove(o.Path) // while it is locked; the first error counts
		}
		if err != nil {
			_ = unix.Close(fd) // nothing was written through it
		}
	}()
	page, reason, err := checkFilesystem(fd, o.Path)
	if err != nil {
		return nil, arena{}, nil, err
	}
	f = &file{path: o.Path, fd: fd}
	want := layoutOf(o.Bytes, o.SlabBytes, page)
	r = &Recovery{Path: o.Path, New: made}
	if err := f.examine(&want, r); err != nil {
		return nil, arena{}, nil, err
	}
	if r.New || r.Cold != "" { // a file that is used again has its memory since it was made
		if err := f.make(&want, o.HashSeed, o.Clock()); err != nil {
			return nil, arena{}, nil, err
		}
	}
	err = f.mapMeta()
	if errors.Is(err, errNoSuper) { // a file that is made anew has other pages
		r.Cold = err.Error()
		if err = f.make(&want, o.HashSeed, o.Clock()); err == nil {
			err = f.mapMeta()
		}
	}
	if err != nil {
		return nil, arena{}, nil, err
	}
	a, err = mapArena(fd, o.Bytes, page)
	if err != nil {
		return nil, arena{}, nil, errors.Join(err, unix.Munmap(f.meta))
	}
	a.reason = reason
	return f, a, r, nil
}

// examine reads the superblock there is and decides whether the content can be used.
func (f *file) examine(want *layout, r *Recovery) error {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return fmt.Errorf("dram: %s: %w", f.path, err)
	}
	if st.Size == 0 {
		r.New = true
		return nil
	}
	b, err := readSuper(f.fd, st.Size)
	if errors.Is(err, unix.EIO) && st.Size == want.end {
		r.Cold = errNoSuper.Error() // no other file has that size
		return nil
	}
	if err != nil {
		return fmt.Errorf("dram: %s: %w", f.path, err)
	}
	s, bad := decodeSuper(b)
	if errors.Is(bad, errBlank) && st.Size == want.end && st.Blocks*512 > want.page {
		bad = errNoSuper // it was a pool's of this size, and lost the pages at its end
	}
	if errors.Is(bad, errForeign) || errors.Is(bad, errBlank) && st.Blocks*512 > want.page {
		return fmt.Errorf("dram: %s: %d bytes that are no pool's: allowed is a file that is not there, or one that a pool made", f.path, st.Size)
	}
	r.Cold = s.unfit(want, st.Size, bad)
	s.layout = *want
	f.super = s
	return nil
}

func readSuper(fd int, size int64) ([]byte, error) {
	b := make([]byte, superBytes)
	if size < superBytes {
		return nil, errForeign
	}
	n, err := unix.Pread(fd, b, size-superBytes)
	return b[:n], err
}

// mapMeta maps all but the arena.
func (f *file) mapMeta() (err error) {
	l := &f.super.layout
	f.meta, err = unix.Mmap(f.fd, l.headers, int(l.end-l.headers), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("dram: %s: map %d bytes: %w", f.path, l.end-l.headers, err)
	}
	f.whole = f.meta[l.super-l.headers:][:superBytes]
	f.headers = headersIn(f.meta, int(l.cells()))
	if !f.touch(func() {
		f.usable = int(min(int64(word(f.whole, superGrown).Load()), l.cells()*headerBytes) / headerBytes)
		sign(f.whole)
	}) {
		return errors.Join(errNoSuper, unix.Munmap(f.meta))
	}
	return nil
}

// errNoSuper is a superblock whose page went bad.
var errNoSuper = errors.New("its superblock cannot be read")

// close gives the file back. The lock ends with the last descriptor and the last mapping, this process's or another's.
func (f *file) close() error {
	if f == nil {
		return nil
	}
	f.touch(func() { alive(f.whole) })
	return unix.Munmap(f.meta) // the descriptor is the arena's
}

// area is a part of the file behind the arena.
func (f *file) area(from, bytes int64) []byte { return f.meta[from-f.super.layout.headers:][:bytes] }

// now is the time in ticks since the file was made. It does not go back.
func (f *file) now(t time.Time) uint32 {
	if n := (t.UnixNano() - f.super.created) / int64(tickLength); n > int64(f.tick) && n < 1<<32 {
		f.tick = uint32(n)
	}
	return f.tick
}
