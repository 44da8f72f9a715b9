package mover

import (
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// Bytes of the elements of a sample.
const (
	wirePiece       = 24
	wireSampleBlock = 8
)

// putSample puts a sample. Its number is the ticket.
func putSample(b []byte, t cudaipc.Ticket, s *cudaipc.Sample) []byte {
	b = putHead(b, msgSum, uint64(t))
	b = put64(put32(b, uint32(s.Peer)), uint64(s.Within))
	b = put32(b, uint32(len(s.Pieces)))
	for i := range s.Pieces {
		p := &s.Pieces[i]
		b = put64(put32(b, uint32(p.Region)), p.Offset)
		b = put32(put64(b, p.Stride), p.Bytes)
	}
	b = put32(b, uint32(len(s.Blocks)))
	for i := range s.Blocks {
		b = put32(put32(b, s.Blocks[i].Block), s.Blocks[i].Seed)
	}
	return b
}

func takeSample(f *fields) (*cudaipc.Sample, error) {
	s := &cudaipc.Sample{Peer: cudaipc.PeerID(f.u32()), Within: time.Duration(f.u64())}
	s.Pieces = make([]cudaipc.Piece, f.count(wirePiece))
	for i := range s.Pieces {
		s.Pieces[i] = cudaipc.Piece{Region: cudaipc.RegionID(f.u32()), Offset: f.u64(), Stride: f.u64(), Bytes: f.u32()}
	}
	s.Blocks = make([]cudaipc.SampleBlock, f.count(wireSampleBlock))
	for i := range s.Blocks {
		s.Blocks[i] = cudaipc.SampleBlock{Block: f.u32(), Seed: f.u32()}
	}
	return s, f.end("sample")
}
