package arena

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// examine reads the superblock and decides whether the content can be used. The rest of the file
// can still be rejected later: by mapMeta, and by the pool when it reads the slabs.
func (f *File) examine(want *Layout) error {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return fmt.Errorf("dram: %s: %w", f.path, err)
	}
	if st.Size == 0 {
		f.made = true
		return nil
	}
	b, err := readSuper(f.fd, st.Size)
	if errors.Is(err, unix.EIO) && st.Size == want.End {
		f.cold = errNoSuper.Error() // no other file has that size
		return nil
	}
	if err != nil {
		return fmt.Errorf("dram: %s: %w", f.path, err)
	}
	s, bad := decodeSuper(b)
	if errors.Is(bad, errBlank) && st.Size == want.End && st.Blocks*512 > want.page {
		bad = errNoSuper // it was a pool's of this size and lost the pages at its end
	}
	if errors.Is(bad, errForeign) || errors.Is(bad, errBlank) && st.Blocks*512 > want.page {
		return fmt.Errorf(
			"dram: %s: %d bytes that are no pool's: allowed is a file that is not there, or one that a pool made",
			f.path, st.Size,
		)
	}
	f.cold = s.unfit(want, st.Size, bad)
	s.Layout = *want
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

// errNoSuper is a superblock whose page went bad.
var errNoSuper = errors.New("its superblock cannot be read")

// unfit returns why the content of a file of this size cannot be used for a pool of this layout;
// empty if it can. bad is the error of decodeSuper.
func (s *superblock) unfit(want *Layout, size int64, bad error) string {
	switch {
	case bad != nil:
		return bad.Error()
	case s.format != fileFormat:
		return fmt.Sprintf("its format is %d, known is %d", s.format, fileFormat)
	case s.arena != want.arena || s.slab != want.slab || s.page != want.page:
		return fmt.Sprintf("its arena has %d bytes in slabs of %d and pages of %d, this pool's %d, %d and %d",
			s.arena, s.slab, s.page, want.arena, want.slab, want.page)
	case s.Headers != want.Headers || s.Spaces != want.Spaces || s.Slabs != want.Slabs || s.Learned != want.Learned:
		return "its areas lie elsewhere"
	case s.grown%HeaderBytes != 0 || s.grown > uint64(want.Learned-want.Headers) ||
		s.spacesUsed > MaxSpaces || s.learnedUsed > learnedBytes:
		return "its superblock is damaged"
	case size != want.End:
		return fmt.Sprintf("it has %d bytes, not %d", size, want.End)
	}
	return ""
}
