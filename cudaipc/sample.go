package cudaipc

import (
	"fmt"
	"time"

	"github.com/kvagent/kvagent/crc32c"
	"github.com/kvagent/kvagent/pagefault"
)

// MaxSampleWait is the longest Sample.Within. A mover is not killed for a sum that takes as long.
const MaxSampleWait = 5 * time.Second

// SampleScratch is how many bytes of a peer's memory are read at once for a sum.
const SampleScratch = 256 << 10

// Piece is where one segment of every block of a group lies: that of block b is the Bytes bytes at
// Offset + b*Stride of Region.
type Piece struct {
	Region         RegionID
	Offset, Stride uint64
	Bytes          uint32
}

// SampleBlock is a block of the peer, and the state that its checksum starts from.
type SampleBlock struct{ Block, Seed uint32 }

// Sample asks for the checksums of blocks of one group, computed from the peer's own memory. The
// device may read Pieces and Blocks until it is done.
type Sample struct {
	Within time.Duration // above 0, at most MaxSampleWait, from Sum on: blocks whose sums are not there by then are bad
	Pieces []Piece       // of the group, in the order of a block's bytes
	Blocks []SampleBlock
}

// errSampleLate is the error of a block that was not summed in time.
var errSampleLate = fmt.Errorf("not summed in time")

// SumBytes continues a CRC-32C over n bytes at off of a mapping of this process. A page that
// cannot be read is an error. The whole mapping is guarded: the kernel may report the start of
// such a page, which may lie before off.
func SumBytes(state uint32, mapping []byte, off, n int64) (sum uint32, err error) {
	err = pagefault.Guard(mapping, nil, func() { sum = crc32c.Update(state, mapping[off:off+n]) })
	return sum, err
}

// Stretch is some bytes of a region.
type Stretch struct {
	In  *Opened
	Off uint64
}

// ReadPeer fills a slice with the bytes of a stretch. Nothing is read after it has returned.
type ReadPeer func(from Stretch, into []byte) error

// Sum computes the sums of a sample. scratch has SampleScratch bytes.
func (f *Flight) Sum(read ReadPeer, scratch []byte) {
	s := f.Sample
	f.End.Sums = make([]uint32, len(s.Blocks))
	for i := range s.Blocks {
		sum, err := f.sumBlock(&s.Blocks[i], read, scratch)
		f.End.Sums[i] = sum
		if err != nil {
			f.End.MarkBad(i, len(s.Blocks), err)
		}
	}
}

func (f *Flight) sumBlock(b *SampleBlock, read ReadPeer, scratch []byte) (uint32, error) {
	sum := b.Seed
	for i := range f.Sample.Pieces {
		piece := &f.Sample.Pieces[i]
		at := Stretch{f.peer.Regions[piece.Region], piece.Offset + uint64(b.Block)*piece.Stride}
		for left := int(piece.Bytes); left > 0; {
			if time.Now().After(f.until) {
				return 0, errSampleLate
			}
			part := scratch[:min(left, len(scratch))]
			if err := read(at, part); err != nil {
				return 0, err
			}
			sum = crc32c.Update(sum, part)
			at.Off += uint64(len(part))
			left -= len(part)
		}
	}
	return sum, nil
}
