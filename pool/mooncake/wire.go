package mooncake

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/vmihailenco/msgpack/v5"
)

// Limits of the frames between store and helper, described in python/kvagent/mooncake.py.
const (
	wireVersion = 2
	maxFrame    = 1 << 20 // bytes
	maxKeys     = 128     // of one request
	maxReason   = 4096    // bytes of a helper's error text
)

type operation uint8

const (
	opPut    operation = 1
	opGet    operation = 2
	opExists operation = 3
	opDelete operation = 4
)

// The memory areas of a place.
const (
	areaBounce = 0
	areaArena  = 1
)

// A frame is its length and a msgpack array of the fields of one of these, in its shortest form.
type (
	hello struct {
		Version       int
		Settings      clientSettings
		Bounce, Arena int64 // bytes
	}
	clientSettings struct {
		Host, Metadata            string
		Segment, LocalBuffer      int64 // bytes
		Protocol, Devices, Master string
		Replicas, Concurrency     int
	}

	// welcome is a helper's first frame: it has connected, or why not.
	welcome struct {
		Version      int
		Reason, Name string
	}

	// transferRequest is a put or a get, keysRequest a question or a delete.
	transferRequest struct {
		ID     uint64
		Op     operation
		Places []place
	}
	keysRequest struct {
		ID   uint64
		Op   operation
		Keys []string
	}

	// place is where a value is in an area.
	place struct {
		Key                  string
		Area, Offset, Length int64 // but for the area: bytes
	}

	// reply is the answer to a request: a code for each key.
	reply struct {
		ID    uint64
		Codes []int64
	}
)

func encode(frame any) []byte {
	var out bytes.Buffer
	out.Write(make([]byte, 4))
	enc := msgpack.NewEncoder(&out)
	enc.UseArrayEncodedStructs(true)
	enc.UseCompactInts(true)
	if err := enc.Encode(frame); err != nil {
		panic(err) // these types can be encoded, and writes to memory do not fail
	}
	b := out.Bytes()
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

var errFrame = errors.New("mooncake: invalid frame from the helper")

// decode decodes a frame without its length.
func decode[T any](b []byte) (frame T, err error) {
	if msgpack.Unmarshal(b, &frame) != nil || !bytes.Equal(encode(&frame)[4:], b) {
		return *new(T), errFrame
	}
	return frame, nil
}

// readFrame reads the msgpack of the next frame.
func readFrame(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxFrame {
		return nil, fmt.Errorf("mooncake: frame of %d bytes, allowed: at most %d", n, maxFrame)
	}
	b := make([]byte, n)
	_, err := io.ReadFull(r, b)
	return b, err
}

// checkWelcome returns why a helper cannot be used, by its first frame.
func checkWelcome(version int, reason string) error {
	switch {
	case version != wireVersion:
		return fmt.Errorf("%w: version %d, must be %d (the Python package is of another release)",
			errFrame, version, wireVersion)
	case reason != "":
		return fmt.Errorf("helper: %s", reason[:min(len(reason), maxReason)])
	}
	return nil
}

func decodeReply(b []byte) (reply, error) {
	r, err := decode[reply](b)
	if n := len(r.Codes); err == nil && (n < 1 || n > maxKeys) {
		return reply{}, errFrame
	}
	return r, err
}
