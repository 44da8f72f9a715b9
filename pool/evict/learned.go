package evict

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
)

// What was learned, as bytes: magic, version, classes, bins (uint32 each), then for each class and bin the blocks at
// risk and those used (float32), then CRC-32C of all before. Little-endian.
const (
	learnedMagic   = 0x7a68766b // "kvhz"
	learnedVersion = 1
	learnedHead    = 4 * 4
	learnedBytes   = learnedHead + numClasses*numBins*2*4 + 4

	maxCount = 1e12 // blocks; more is taken for damage
)

// ErrLearned says that bytes are not what Learned gave, or that of another version.
var ErrLearned = errors.New("evict: not something that was learned here")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Learned is what the policy knows of classes, to be given to Learn after a restart. It knows nothing of single blocks.
func (h *Hazard) Learned() []byte {
	b := make([]byte, 0, learnedBytes)
	for _, n := range [...]uint32{learnedMagic, learnedVersion, numClasses, numBins} {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	t := &h.tables
	for c := range t.risk {
		for i := range t.risk[c] {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(t.risk[c][i]/t.weight)))
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(t.used[c][i]/t.weight)))
		}
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// Learn takes over what was learned before; on an error nothing has changed.
func (h *Hazard) Learn(b []byte) error {
	t, err := parseLearned(b)
	if err != nil {
		return err
	}
	h.tables = *t
	h.startRound()
	for c := range numClasses {
		h.scoreClass(c)
	}
	return nil
}

func parseLearned(b []byte) (*tables, error) {
	if len(b) != learnedBytes {
		return nil, fmt.Errorf("%w: %d bytes, must be %d", ErrLearned, len(b), learnedBytes)
	}
	body, sum := b[:learnedBytes-4], binary.LittleEndian.Uint32(b[learnedBytes-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return nil, fmt.Errorf("%w: wrong checksum", ErrLearned)
	}
	for i, want := range [...]uint32{learnedMagic, learnedVersion, numClasses, numBins} {
		if got := binary.LittleEndian.Uint32(b[i*4:]); got != want {
			return nil, fmt.Errorf("%w: word %d is %d, must be %d", ErrLearned, i, got, want)
		}
	}
	t := &tables{weight: 1}
	body = body[learnedHead:]
	for c := range t.risk {
		for i := range t.risk[c] {
			at := (c*numBins + i) * 8
			risk := float64(math.Float32frombits(binary.LittleEndian.Uint32(body[at:])))
			used := float64(math.Float32frombits(binary.LittleEndian.Uint32(body[at+4:])))
			if !(risk >= 0 && risk <= maxCount && used >= 0 && used <= maxCount) {
				return nil, fmt.Errorf("%w: class %d, bin %d: %g at risk, %g used", ErrLearned, c, i, risk, used)
			}
			t.risk[c][i], t.used[c][i] = risk, used
		}
	}
	return t, nil
}
