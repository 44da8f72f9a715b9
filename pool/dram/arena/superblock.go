package arena

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// superblock is the last superBytes of a file, as they lie there. The head is written when the file
// is made; what follows it changes, each number in one store.
type superblock struct {
	magic  [8]byte
	format atomic.Uint64 // 0 while the file is being made
	superHead
	check uint32 // CRC-32C of the head
	_     uint32

	process atomic.Uint64 // that had it last
	_       uint64
	spaces  atomic.Uint64 // records of spaces that were ever used
}

type superHead struct {
	arena, slab, page int64     // bytes
	created           int64     // ns since 1970
	seed              [5]uint64 // of the hash table
}

// SuperEnd is the size of what the superblock holds.
const SuperEnd = int(unsafe.Sizeof(superblock{}))

var _ = [superBytes - SuperEnd]byte{} // it fits

var (
	superMagic = [8]byte([]byte("kvagdram"))
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian

	errUnfinished = errors.New("its making was not finished")
	errBlank      = errors.New("its making had hardly begun")
	errForeign    = errors.New("not a pool's file")
	errNoSuper    = errors.New("its superblock cannot be read") // its page went bad
)

// bytesOf returns the bytes of a value as they lie in memory.
func bytesOf[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

func (s *superblock) sum() uint32 { return crc32.Checksum(bytesOf(&s.superHead), castagnoli) }

// readSuper reads the superblock of a file of this size. With errForeign or errBlank there is none.
func readSuper(fd int, size int64) (*superblock, error) {
	if size < superBytes {
		return nil, errForeign
	}
	s := &superblock{}
	b := bytesOf(s)
	switch n, err := unix.Pread(fd, b, size-superBytes); {
	case err != nil:
		return nil, err
	case n == len(b) && s.magic == [8]byte{}: // an agent that lost the page may have written beside it
		return nil, errBlank
	case n < len(b) || s.magic != superMagic:
		return nil, errForeign
	}
	return s, nil
}

// unfit returns why a file of this size is of no use for a pool of this layout; empty: it is.
func (s *superblock) unfit(want *Layout, size int64) string {
	switch format := s.format.Load(); {
	case format == 0:
		return errUnfinished.Error()
	case format != fileFormat:
		return fmt.Sprintf("its format is %d, known is %d", format, fileFormat)
	case s.check != s.sum() || s.spaces.Load() > MaxSpaces:
		return "its superblock is damaged"
	case s.arena != want.arena || s.slab != want.slab || s.page != want.page:
		return fmt.Sprintf("its arena has %d bytes in slabs of %d and pages of %d, this pool's %d, %d and %d",
			s.arena, s.slab, s.page, want.arena, want.slab, want.page)
	case size != want.End:
		return fmt.Sprintf("it has %d bytes, not %d", size, want.End)
	}
	return ""
}
