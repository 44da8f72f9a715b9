package peer

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/peer/seal"
)

// kind is the number of a message.
type kind uint8

// The messages (docs/PROTOCOL.md, "Agent to agent").
const (
	kindHello     kind = 1
	kindChallenge kind = 2
	kindProof     kind = 3
	kindWelcome   kind = 4
	kindError     kind = 5
	kindSubscribe kind = 6
	kindHave      kind = 7
	kindEnd       kind = 8
	kindGet       kind = 9
	kindBlocks    kind = 10
	kindCancel    kind = 11
	kindDelivered kind = 12
	kindPing      kind = 13
	kindPin       kind = 14
	kindPlaces    kind = 15
	kindUnpin     kind = 16
	kinds              = 17
)

// A frame is a header and, unless it is empty, a payload and its tag. The header is, little-endian:
//
//	0  4  "kvp" and 3
//	4  1  kind
//	5  3  zero
//	8  4  id: of a subscription or a GET, chosen by the client; else 0
//	12 4  bytes that follow the header, with the tags
//	16 16 tag of the bytes before it: zero until both sides are authenticated; until then the
//	      payload has none either
const (
	headerBytes = 32
	macAt       = 16
	macBytes    = seal.TagBytes
	magic       = "kvp\x03"
)

// header is a frame's.
type header struct {
	kind   kind
	id     uint32
	length uint32
}

// maxLength bounds what follows the header of each kind, bytes.
var maxLength = [kinds]uint32{
	kindHello:     helloBytes,
	kindChallenge: challengeBytes,
	kindProof:     proofBytes,
	kindWelcome:   0,
	kindError:     maxErrorText + macBytes,
	kindSubscribe: subscribeBytes + MaxName + 256*groupBytes + MaxHashes*32 + macBytes,
	kindHave:      maxRuns*runBytes + macBytes,
	kindEnd:       endBytes + macBytes,
	kindGet:       getBytes + MaxBatch*32 + macBytes,
	kindBlocks:    maxBlocks,
	kindCancel:    0,
	kindDelivered: 16 + MaxName + macBytes,
	kindPing:      0,
	kindPin:       getBytes + MaxBatch*32 + macBytes,
	kindPlaces:    placesBytes + pool.MaxTarget + MaxBatch*placeBytes + macBytes,
	kindUnpin:     0,
}

// maxBlocks is the length of the longest BLOCKS: its table, and a block of which every part has a
// tag.
const maxBlocks = tableBytes + MaxBatch*rowBytes + macBytes + MaxBlockBytes + MaxBlockBytes/seal.Part*macBytes

// errMalformed is wrapped by what a peer sent against the protocol.
var errMalformed = errors.New("malformed")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errMalformed}, args...)...)
}

// put encodes the header without its tag.
func (h *header) put(b []byte) {
	copy(b, magic)
	b[4], b[5], b[6], b[7] = byte(h.kind), 0, 0, 0
	binary.LittleEndian.PutUint32(b[8:], h.id)
	binary.LittleEndian.PutUint32(b[12:], h.length)
	clear(b[macAt:headerBytes])
}

// parseHeader decodes a header of headerBytes and checks all of it but the tag.
func parseHeader(b []byte) (h header, err error) {
	h = header{
		kind: kind(b[4]), id: binary.LittleEndian.Uint32(b[8:]), length: binary.LittleEndian.Uint32(b[12:]),
	}
	switch {
	case string(b[:4]) != magic:
		return h, malformed("begins with %x, not with %x", b[:4], magic)
	case h.kind == 0 || h.kind >= kinds || b[5] != 0 || b[6] != 0 || b[7] != 0:
		return h, malformed("kind %x", b[4:8])
	case h.length > maxLength[h.kind]:
		return h, malformed("kind %d with %d bytes, allowed: at most %d", h.kind, h.length, maxLength[h.kind])
	}
	return h, nil
}
