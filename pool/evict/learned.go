package evict

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/kvagent/kvagent/pool"
)

// The learned state, encoded little-endian: magic, version, classes, bins (uint32 each); for each
// class and bin the blocks at risk and those used (float32 each); CRC-32C of all before.
const (
	learnedMagic   = 0x7a68766b // "kvhz"
	learnedVersion = 7
	learnedHead    = 4 * 4
	learnedBytes   = learnedHead + numClasses*numBins*2*4 + 4

	maxCount = 1e12 // blocks; more is taken for damage
)

var (
	// ErrLearned is for bytes that Learned did not return.
	ErrLearned = errors.New("evict: not something that was learned here")
	// ErrLearnedVersion is for bytes of another version of the policy.
	ErrLearnedVersion = errors.New("evict: learned by another version")

	castagnoli = crc32.MakeTable(crc32.Castagnoli)

	_ = [pool.MaxLearned - learnedBytes]byte{}
)

// Learned implements advisor.Learner.
func (h *Hazard) Learned() []byte {
	b := make([]byte, 0, learnedBytes)
	for _, n := range [...]uint32{learnedMagic, learnedVersion, numClasses, numBins} {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	t := h.tables
	t.settleAll()
	for c := range t.risk {
		for i := range t.risk[c] {
			b = appendFloat(b, float64(t.risk[c][i])/t.weight)
			b = appendFloat(b, float64(t.used[c][i])/t.weight)
		}
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func appendFloat(b []byte, f float64) []byte {
	return binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(f)))
}

// Learn implements advisor.Learner.
func (h *Hazard) Learn(b []byte) error {
	t, err := parseLearned(b)
	if err != nil {
		return err
	}
	h.tables = *t
	h.scoreAll()
	return nil
}

// parseLearned returns ErrLearnedVersion for another version, before it checks for damage.
func parseLearned(b []byte) (*tables, error) {
	if len(b) < learnedHead+4 {
		return nil, fmt.Errorf("%w: %d bytes, must be %d", ErrLearned, len(b), learnedBytes)
	}
	body, sum := b[:len(b)-4], binary.LittleEndian.Uint32(b[len(b)-4:])
	if got := crc32.Checksum(body, castagnoli); got != sum {
		return nil, fmt.Errorf("%w: the checksum of %d bytes is %08x, must be %08x", ErrLearned, len(body), got, sum)
	}
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(b[i*4:]) }
	switch {
	case word(0) != learnedMagic:
		return nil, fmt.Errorf("%w: begins with %08x, must be %08x", ErrLearned, word(0), uint32(learnedMagic))
	case word(1) != learnedVersion:
		return nil, fmt.Errorf("%w: version %d, this one reads version %d", ErrLearnedVersion, word(1), learnedVersion)
	case word(2) != numClasses || word(3) != numBins || len(b) != learnedBytes:
		return nil, fmt.Errorf("%w: %d classes of %d bins in %d bytes, must be %d of %d in %d", ErrLearned,
			word(2), word(3), len(b), numClasses, numBins, learnedBytes)
	}
	return parseKnowledge(body[learnedHead:])
}

func parseKnowledge(b []byte) (*tables, error) {
	t := &tables{weight: 1}
	for c := range t.risk {
		for i := range t.risk[c] {
			at := (c*numBins + i) * 2
			risk, used := floatAt(b, at), floatAt(b, at+1)
			if !isCount(risk) || !isCount(used) {
				return nil, fmt.Errorf("%w: class %d, bin %d: %g at risk, %g used", ErrLearned, c, i, risk, used)
			}
			t.risk[c][i], t.used[c][i] = float32(risk), float32(used)
		}
	}
	return t, nil
}

// isCount reports whether f may be a count that Learned wrote: it never wrote a negative zero.
func isCount(f float64) bool { return f <= maxCount && !math.Signbit(f) }

// floatAt returns the i-th float32.
func floatAt(b []byte, i int) float64 {
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
}
