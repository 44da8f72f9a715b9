package arena

import (
	"crypto/rand"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// providePiece is allocated in one call; a signal makes the kernel restart a call.
const providePiece = 32 << 20

// make makes the file anew. The magic of the superblock is written first, so that an unfinished
// file is recognised as a pool's, and its format last.
func (f *File) make(l *Layout, seed [5]uint64, now time.Time) error {
	f.super = superblock{format: fileFormat, Layout: *l, created: now.UnixNano(), seed: seed}
	if _, err := rand.Read(f.super.name[:]); err != nil {
		return fmt.Errorf("dram: a name for %s: %w", f.path, err)
	}
	for _, step := range []func() error{
		func() error { return f.size(0) },
		func() error { return f.fits(l) },
		func() error { return f.size(l.End) },
		func() error { return f.provide(l.Slabs, l.End) },
		func() error { return f.changeSuper(func(b []byte) { word(b, 0).Store(le.Uint64([]byte(superMagic))) }) },
		func() error { return f.provide(0, l.Headers) },
		func() error { return f.changeSuper(f.writeSuper) },
	} {
		if err := step(); err != nil {
			_ = f.size(0) // frees the memory; the first error is returned
			return err
		}
	}
	return nil
}

// fits refuses a file for which the machine has no memory. Huge pages are reserved, so provide
// finds out whether there are enough.
func (f *File) fits(l *Layout) error {
	if l.page > PageBytes {
		return nil
	}
	return checkMemory(l.least(), systemFiles)
}

func (f *File) size(n int64) error {
	if err := unix.Ftruncate(f.fd, n); err != nil {
		return fmt.Errorf("dram: %s: %d bytes: %w", f.path, n, err)
	}
	return nil
}

// provide allocates the memory of a range of the file, so that accessing it cannot fail.
func (f *File) provide(from, to int64) error {
	for from < to {
		n := min(providePiece, to-from)
		switch err := unix.Fallocate(f.fd, 0, from, n); {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM):
			return f.full(to-from, err)
		case err != nil:
			return fmt.Errorf("dram: %s: memory for %d bytes: %w", f.path, to-from, err)
		}
		from += n
	}
	return nil
}

// full returns an error with the room that there is.
func (f *File) full(need int64, err error) error {
	var fs unix.Statfs_t
	if f.super.page > PageBytes {
		free, _ := freeHugePages(systemFiles) // 0 if unknown
		return fmt.Errorf(
			"dram: %s: no room for %s more in huge pages, of those of 2 MiB %d are free: %w", f.path, gib(need), free,
			err,
		)
	}
	if unix.Fstatfs(f.fd, &fs) != nil {
		return fmt.Errorf("dram: %s: no room for %s more: %w", f.path, gib(need), err)
	}
	return fmt.Errorf("dram: %s: no room for %s more: its file system has %s, of them free %s: %w",
		f.path, gib(need), gib(int64(fs.Blocks)*fs.Bsize), gib(int64(fs.Bavail)*fs.Bsize), err)
}

// writeSuper writes the fixed part, its format last.
func (f *File) writeSuper(b []byte) {
	fixed := f.super.encode()
	copy(b[16:], fixed[16:])
	word(b, 8).Store(le.Uint64(fixed[8:]))
}

// changeSuper maps the superblock for a change, because hugetlbfs has no write.
func (f *File) changeSuper(change func(b []byte)) error {
	l := &f.super.Layout
	at := l.End - l.page
	page, err := unix.Mmap(f.fd, at, int(l.page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("dram: %s: map its superblock: %w", f.path, err)
	}
	change(page[l.Super-at:])
	return unix.Munmap(page)
}

// grow makes at least n headers usable; false if the file system is full.
func (f *File) grow(n int) bool {
	if f == nil || n <= f.usable {
		return true
	}
	if n > len(f.headers) {
		return false
	}
	l := &f.super.Layout
	from := int64(f.usable) * HeaderBytes
	to := min(roundUp(max(int64(n)*HeaderBytes, from+from/4), max(l.page, 64<<10)), l.Learned-l.Headers)
	if f.provide(l.Headers+from/l.page*l.page, l.Headers+to) != nil {
		f.refused++
		return false
	}
	f.Touch(func() { word(f.whole, superGrown).Store(uint64(to)) })
	f.usable = int(min(to/HeaderBytes, int64(len(f.headers))))
	return true
}

func headersIn(b []byte, n int) []Header {
	return unsafe.Slice((*Header)(unsafe.Pointer(unsafe.SliceData(b))), n)
}
