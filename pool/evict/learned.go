package evict

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/kvagent/kvagent/pool"
)

// learned is the learned state, encoded little-endian, and behind it the CRC-32C of all.
type learned struct {
	Magic, Version, Classes, Bins uint32
	Risk, Used                    [numClasses][numBins]float32 // blocks, with a weight of 1
}

const (
	learnedMagic   = 0x7a68766b // "kvhz"
	learnedVersion = 8
	learnedBytes   = 4*4 + numClasses*numBins*2*4 + 4

	maxCount = 1e12 // blocks; more is taken for damage
)

var (
	// ErrLearned is for bytes that Learned of this version did not return.
	ErrLearned = errors.New("evict: not something that was learned here")

	castagnoli = crc32.MakeTable(crc32.Castagnoli)

	_ = [pool.MaxLearned - learnedBytes]byte{}
)

// Learned implements advisor.Learner.
func (h *Hazard) Learned() []byte {
	t := h.tables
	t.settleAll()
	t.scale()
	b, err := binary.Append(make([]byte, 0, learnedBytes), binary.LittleEndian,
		&learned{learnedMagic, learnedVersion, numClasses, numBins, t.risk, t.used})
	if err != nil {
		panic(err) // of a type without a fixed size
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// Learn implements advisor.Learner.
func (h *Hazard) Learn(b []byte) error {
	if len(b) != learnedBytes {
		return fmt.Errorf("%w: %d bytes, must be %d", ErrLearned, len(b), learnedBytes)
	}
	body, sum := b[:len(b)-4], binary.LittleEndian.Uint32(b[len(b)-4:])
	if got := crc32.Checksum(body, castagnoli); got != sum {
		return fmt.Errorf("%w: the checksum of %d bytes is %08x, must be %08x", ErrLearned, len(body), got, sum)
	}
	var x learned
	if _, err := binary.Decode(body, binary.LittleEndian, &x); err != nil {
		return err
	}
	got := [...]uint32{x.Magic, x.Version, x.Classes, x.Bins}
	if want := [...]uint32{learnedMagic, learnedVersion, numClasses, numBins}; got != want {
		return fmt.Errorf("%w: magic, version, classes and bins are %x, must be %x", ErrLearned, got, want)
	}
	for c := range x.Risk {
		for i, risk := range x.Risk[c] {
			if used := x.Used[c][i]; !isCount(risk) || !isCount(used) {
				return fmt.Errorf("%w: class %d, bin %d: %g at risk, %g used", ErrLearned, c, i, risk, used)
			}
		}
	}
	h.tables = tables{risk: x.Risk, used: x.Used, weight: 1}
	h.seen = unrefusing
	h.scoreAll()
	return nil
}

// isCount reports whether f may be a count that Learned wrote: it never wrote a negative zero.
func isCount(f float32) bool { return f <= maxCount && !math.Signbit(float64(f)) }
