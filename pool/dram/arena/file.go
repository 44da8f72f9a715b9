package arena

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pagefault"
)

// File is the file of a pool that outlives its process, on tmpfs or hugetlbfs, so that it costs no
// more than the pool's memory. Its methods do nothing on nil, and are called with the pool's lock
// held unless they say otherwise.
//
// Each store is of one atomic word, and the order of stores keeps the file consistent if the
// process is killed at any moment: the kernel keeps the pages, and the next process sees every
// store that was executed. There is no fsync, because the file does not outlive the machine.
type File struct {
	path   string
	layout Layout
	super  *superblock
	meta   []byte    // from the headers to the end
	fd     int       // the arena's
	own    int       // with the agent's own lock
	began  time.Time // when the file was made
	seed   [5]uint64

	headers []Header      // by slot; see Header
	Tick    uint32        // of the last store or load
	refused uint64        // times that an area could not grow because the file system was full
	faults  atomic.Uint64 // faults in pages outside the arena

	made bool   // the file did not exist or was empty
	cold string // why its content cannot be used; empty: it can, or the file is new
}

// FileOptions are the parameters of a pool's file.
type FileOptions struct {
	Path             string
	Abandon          bool      // a new file takes the place of an orphan; see HeldError
	Bytes, SlabBytes int64     // of the arena, and of a slab
	Seed             [5]uint64 // of the hash table, for a new file
	Now              time.Time
}

// tickLength is the unit of the clock in headers.
const tickLength = 100 * time.Millisecond

// OpenFile opens the file of a pool, which it creates if necessary, and maps it.
func OpenFile(o *FileOptions) (f *File, a *Arena, err error) {
	fd, own, made, err := lockPath(o.Path, o.Abandon)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil && made {
			_ = os.Remove(o.Path) // while it is locked; the first error is returned
		}
		if err != nil {
			_, _ = unix.Close(fd), unix.Close(own) // nothing was written through them
		}
	}()
	page, reason, err := checkFilesystem(fd, o.Path)
	if err != nil {
		return nil, nil, err
	}
	f = &File{path: o.Path, fd: fd, own: own, made: made, layout: LayoutOf(o.Bytes, o.SlabBytes, page)}
	if err := f.examine(); err != nil {
		return nil, nil, err
	}
	if !f.made && f.cold == "" { // an existing file has had its memory since it was made
		if err = f.mapMeta(); err == nil && !f.Touch(f.open) {
			f.cold, err = errNoSuper.Error(), unix.Munmap(f.meta) // the file made anew has other pages
		}
	}
	if err == nil && (f.made || f.cold != "") {
		err = f.make(o.Seed, o.Now)
	}
	if err != nil {
		return nil, nil, err
	}
	a, err = mapArena(fd, o.Bytes, page)
	if err != nil {
		return nil, nil, errors.Join(err, unix.Munmap(f.meta))
	}
	a.reason = reason
	return f, a, nil
}

// mapMeta maps all but the arena.
func (f *File) mapMeta() (err error) {
	l := &f.layout
	f.meta, err = unix.Mmap(
		f.fd, l.Headers, int(l.End-l.Headers), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE,
	)
	if err != nil {
		return fmt.Errorf("dram: %s: map %d bytes: %w", f.path, l.End-l.Headers, err)
	}
	f.super = (*superblock)(unsafe.Pointer(&f.area(l.Super, superBytes)[0]))
	f.headers = unsafe.Slice((*Header)(unsafe.Pointer(unsafe.SliceData(f.meta))), l.slots())
	return nil
}

// open signs the file, for the message of an agent that finds it locked, and reads what its content
// begins with.
func (f *File) open() {
	f.began = time.Unix(0, f.super.created)
	f.seed = f.super.seed
	f.super.process.Store(uint64(os.Getpid()))
}

// Close unmaps what OpenFile mapped outside the arena, and ends the agent's own lock.
func (f *File) Close() error { return errors.Join(unix.Munmap(f.meta), unix.Close(f.own)) }

// area returns a part of the file after the arena.
func (f *File) area(from, bytes int64) []byte { return f.meta[from-f.layout.Headers:][:bytes] }

// SetTime sets the clock in ticks since the file was made, and returns it. The clock is monotonic.
func (f *File) SetTime(t time.Time) uint32 {
	if n := int64(t.Sub(f.began) / tickLength); n > int64(f.Tick) && n < 1<<32 {
		f.Tick = uint32(n)
	}
	return f.Tick
}

// Faulted returns how often pages of the file outside the arena could not be read or written.
func (f *File) Faulted() uint64 { return f.faults.Load() }

// TimesFull returns how often an area could not grow because the file system was full.
func (f *File) TimesFull() uint64 { return f.refused }

// State returns whether a file just opened was made now, and why its content cannot be used.
func (f *File) State() (made bool, cold string) { return f.made, f.cold }

// Seed returns the seed of the hash table.
func (f *File) Seed() [5]uint64 { return f.seed }

// Touch runs do, which reads or writes outside the arena, and reports whether no page faulted. The
// content of a page that faults is lost: its headers count as free, its spaces as removed.
func (f *File) Touch(do func()) bool {
	if pagefault.Guard(f.meta, nil, do) == nil {
		return true
	}
	f.faults.Add(1)
	return false
}

// TouchEach runs do in a Touch for each number in [from, to), and returns how many faulted.
func (f *File) TouchEach(from, to uint32, do func(i uint32)) (faulted int64) {
	for i := from; i < to; i++ {
		if f.Touch(func() {
			for ; i < to; i++ {
				do(i)
			}
		}) {
			break
		}
		faulted++
	}
	return faulted
}

// AtLeast advances the clock of the file to a tick.
func (f *File) AtLeast(tick uint32) { f.Tick = max(f.Tick, tick) }

// examine decides whether the content of the file can be used. It can still be rejected later: when
// the superblock is mapped, and by the pool when it reads the slabs.
func (f *File) examine() error {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return fmt.Errorf("dram: %s: %w", f.path, err)
	}
	if st.Size == 0 {
		f.made = true
		return nil
	}
	s, err := readSuper(f.fd, st.Size)
	filled, whole := st.Blocks*512 > f.layout.page, st.Size == f.layout.End
	switch {
	case err == nil:
		f.cold = s.unfit(&f.layout, st.Size)
	case errors.Is(err, errBlank) && !filled:
		f.cold = err.Error()
	case whole && (errors.Is(err, unix.EIO) || errors.Is(err, errBlank)):
		f.cold = errNoSuper.Error() // no other file has that size: it lost the pages at its end
	case errors.Is(err, errForeign) || errors.Is(err, errBlank):
		return fmt.Errorf(
			"dram: %s: %d bytes that are no pool's: allowed is a file that is not there, or one that a pool made",
			f.path, st.Size,
		)
	default:
		return fmt.Errorf("dram: %s: %w", f.path, err)
	}
	return nil
}
