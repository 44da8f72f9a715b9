package peer

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/peer/seal"
)

var update = flag.Bool("update", false, "write testdata/wire/peer.json anew")

const vectorsFile = "../../testdata/wire/peer.json"

// vector is a frame. The parts of one side's frames are numbered from 0 on, from the first with a
// tag.
type vector struct {
	Name   string         `json:"name"`
	From   string         `json:"from"` // client or server
	Kind   kind           `json:"kind"`
	ID     uint32         `json:"id"`
	Fields map[string]any `json:"fields,omitempty"`
	Hex    string         `json:"hex"` // the header and the payload, with tags; of BLOCKS with its bytes
}

type badVector struct {
	Name string `json:"name"`
	Hex  string `json:"hex"`
}

type vectors struct {
	Key       string      `json:"key"`
	Handshake []vector    `json:"handshake"`
	Frames    []vector    `json:"frames"`
	Malformed []badVector `json:"malformed"` // headers and payloads that must be refused, whatever the tags
}

func filled(from byte) (b [32]byte) {
	for i := range b {
		b[i] = from + byte(i)
	}
	return b
}

// makeVectors plays one connection.
func makeVectors(t *testing.T) (v vectors) {
	key := filled(0)
	v.Key = hex.EncodeToString(key[:])
	h := hello{low: version, high: version, timeout: 2 * time.Second, nonce: filled(0x20)}
	ch := challenge{version: version, timeout: 3 * time.Second, nonce: filled(0x40)}
	tr := transcript{key[:], h.encode(), ch.encode()}
	copy(ch.proof[:], tr.derive(labelServer))
	tr.challenge = ch.encode()
	bare := func(name, from string, k kind, payload []byte, fields map[string]any) {
		b := make([]byte, headerBytes)
		(&header{kind: k, length: uint32(len(payload))}).put(b)
		text := hex.EncodeToString(slices.Concat(b, payload))
		v.Handshake = append(v.Handshake, vector{name, from, k, 0, fields, text})
	}
	bare("hello", "client", kindHello, tr.hello, map[string]any{"low": version, "high": version, "timeout_ms": 2000,
		"nonce": hex.EncodeToString(h.nonce[:])})
	bare("challenge", "server", kindChallenge, tr.challenge, map[string]any{"version": version, "timeout_ms": 3000,
		"nonce": hex.EncodeToString(ch.nonce[:]), "proof": hex.EncodeToString(ch.proof[:])})
	proof := tr.derive(labelClient)
	bare("proof", "client", kindProof, proof, map[string]any{"proof": hex.EncodeToString(proof)})

	sides := map[string]*conn{
		"client": {out: seal.New(tr.derive(labelToServer))}, "server": {out: seal.New(tr.derive(labelToClient))},
	}
	space, hashes := pool.Fingerprint(key[:16]), chain("vector", 3)
	data := []byte("the bytes of one shard")
	k := pool.Key{Space: space, Group: 2, Shard: 1, Hash: pool.MakeHash(hashes.At(0))}
	sum := pool.Sum(k.Seed(uint32(len(data))), data)
	for _, f := range []struct {
		name, from string
		kind       kind
		id         uint32
		payload    []byte
		data       []byte
		fields     map[string]any
	}{
		{"welcome", "server", kindWelcome, 0, nil, nil, nil},
		{"subscribe", "client", kindSubscribe, 1, (&subscribe{wait: 1500 * time.Millisecond, early: true, space: space,
			name: "r/p-1/req", groups: []subscribeGroup{{0, hashes.Slice(0, 2)}, {2, hashes}}}).encode(), nil,
			map[string]any{"wait_ms": 1500, "early": 1, "name": "r/p-1/req", "space": hex.EncodeToString(space[:]),
				"groups": []any{
					map[string]any{"group": 0, "hash_len": 32, "hashes": hex.EncodeToString(hashes.Blob[:64])},
					map[string]any{"group": 2, "hash_len": 32, "hashes": hex.EncodeToString(hashes.Blob)},
				}}},
		{"have", "server", kindHave, 1, encodeHave([]run{{0, 2}, {4, 1}}), nil,
			map[string]any{"runs": []any{
				map[string]any{"first": 0, "count": 2}, map[string]any{"first": 4, "count": 1},
			}}},
		{"get", "client", kindGet, 2, (&get{space: space, length: uint32(len(data)), group: 2, shard: 1,
			hashes: hashes.Slice(0, 2)}).encode(nil), nil,
			map[string]any{"space": hex.EncodeToString(space[:]), "length": len(data), "group": 2, "shard": 1,
				"hash_len": 32, "hashes": hex.EncodeToString(hashes.Blob[:64])}},
		{"blocks", "server", kindBlocks, 2, encodeTable(nil, []row{{pool.OK, sum}, {status: pool.Missing}}), data,
			map[string]any{"rows": []any{
				map[string]any{"status": 0, "sum": sum}, map[string]any{"status": 5, "sum": 0},
			},
				"bytes": hex.EncodeToString(data)}},
		{"end", "server", kindEnd, 1, encodeEnd(EndComplete, 48), nil, map[string]any{"end": 1, "tokens": 48}},
		{"cancel", "client", kindCancel, 1, nil, nil, nil},
		{"delivered", "client", kindDelivered, 0, (&delivered{space, "t/7"}).encode(), nil,
			map[string]any{"space": hex.EncodeToString(space[:]), "name": "t/7"}},
		{"ping", "client", kindPing, 0, nil, nil, nil},
		{"ping_back", "server", kindPing, 0, nil, nil, nil},
		{"error", "server", kindError, 0, []byte("so it is"), nil, map[string]any{"text": "so it is"}},
		{"pin", "client", kindPin, 3, (&get{space: space, length: uint32(len(data)), group: 2, shard: 1,
			hashes: hashes.Slice(0, 2)}).encode(nil), nil,
			map[string]any{"space": hex.EncodeToString(space[:]), "length": len(data), "group": 2, "shard": 1,
				"hash_len": 32, "hashes": hex.EncodeToString(hashes.Blob[:64])}},
		{"places", "server", kindPlaces, 3, (&places{protocol: "rdma", target: "10.0.0.7:15002", rows: []placeRow{
			{row{pool.OK, sum}, 0x7f0000001000}, {row: row{status: pool.Missing}},
		}}).encode(), nil, map[string]any{"outcome": 0, "protocol": 2, "target": "10.0.0.7:15002", "rows": []any{
			map[string]any{"status": 0, "sum": sum, "address": int64(0x7f0000001000)},
			map[string]any{"status": 5, "sum": 0, "address": 0},
		}}},
		{"places_full", "server", kindPlaces, 4, (&places{outcome: placedFull}).encode(), nil,
			map[string]any{"outcome": 2, "protocol": 0, "target": "", "rows": []any{}}},
		{"unpin", "client", kindUnpin, 3, nil, nil, nil},
	} {
		c := sides[f.from]
		c.seal(f.kind, f.id, f.payload, seal.Sealed(int64(len(f.data))))
		b := append(c.frame, f.data...)
		if len(f.data) > 0 {
			b = c.out.Tag(b, f.data)
		}
		v.Frames = append(v.Frames, vector{f.name, f.from, f.kind, f.id, f.fields, hex.EncodeToString(b)})
	}
	v.Malformed = malformedVectors(t, v.Frames)
	return v
}

// malformedVectors breaks one thing in each of the frames.
func malformedVectors(t *testing.T, frames []vector) (out []badVector) {
	for _, m := range []struct {
		name, of string
		change   func(b []byte) []byte
	}{
		{"magic", "ping", func(b []byte) []byte { b[3] = 2; return b }},
		{"kind_0", "ping", func(b []byte) []byte { b[4] = 0; return b }},
		{"kind_17", "ping", func(b []byte) []byte { b[4] = 17; return b }},
		{"flags", "ping", func(b []byte) []byte { b[5] = 1; return b }},
		{"ping_with_payload", "ping", func(b []byte) []byte { b[12] = 1; return append(b, 0) }},
		{"hello_too_long", "hello", func(b []byte) []byte { b[12]++; return append(b, 0) }},
		{"hello_short", "hello", func(b []byte) []byte { b[12]--; return b[:len(b)-1] }},
		{"hello_timeout_0", "hello", func(b []byte) []byte { b[36], b[37] = 0, 0; return b }},
		{"challenge_reserved", "challenge", func(b []byte) []byte { b[34] = 1; return b }},
		{"subscribe_flag_2", "subscribe", func(b []byte) []byte { b[36] = 2; return b }},
		{"subscribe_no_group", "subscribe", func(b []byte) []byte { b[37] = 0; return b }},
		{"subscribe_group_too_many", "subscribe", func(b []byte) []byte { b[37] = 3; return b }},
		{"subscribe_group_too_few", "subscribe", func(b []byte) []byte { b[37] = 1; return b }},
		{"subscribe_wait", "subscribe", func(b []byte) []byte { b[35] = 1; return b }},
		{"subscribe_name_257", "subscribe", func(b []byte) []byte { b[38], b[39] = 1, 1; return b }},
		{"subscribe_hash_len_0", "subscribe", func(b []byte) []byte { b[66] = 0; return b }},
		{"subscribe_count", "subscribe", func(b []byte) []byte { b[71] = 1; return b }},
		{"have_nothing", "have", func(b []byte) []byte { b[12] = 0; return b[:32] }},
		{"have_count_0", "have", func(b []byte) []byte { b[36] = 0; return b }},
		{"have_beyond", "have", func(b []byte) []byte { b[34] = 1; return b }},
		{"end_0", "end", func(b []byte) []byte { b[32] = 0; return b }},
		{"end_lost", "end", func(b []byte) []byte { b[32] = 8; return b }},
		{"get_hash_len_33", "get", func(b []byte) []byte { b[54] = 33; return b }},
		{"get_part_of_a_hash", "get", func(b []byte) []byte { b[54] = 31; return b }},
		{"get_length_0", "get", func(b []byte) []byte { b[48] = 0; return b }},
		{"get_beyond_8_mib", "get", func(b []byte) []byte { b[50] = 0x41; return b }},
		{"blocks_status_1", "blocks", func(b []byte) []byte { b[44] = 1; return b }},
		{"blocks_sum_of_missing", "blocks", func(b []byte) []byte { b[48] = 1; return b }},
		{"blocks_rows", "blocks", func(b []byte) []byte { b[32] = 3; return b }},
		{"places_outcome_3", "places", func(b []byte) []byte { b[32] = 3; return b }},
		{"places_protocol_3", "places", func(b []byte) []byte { b[33] = 3; return b }},
		{"places_protocol_without_places", "places_full", func(b []byte) []byte { b[33] = 1; return b }},
		{"places_no_target", "places", func(b []byte) []byte { b[34] = 0; return b }},
		{"places_no_rows", "places", func(b []byte) []byte { b[12] = 22; return b[:32+22] }},
		{"places_address_of_missing", "places", func(b []byte) []byte { b[len(b)-1] = 1; return b }},
		{"places_address_2_63", "places", func(b []byte) []byte { b[len(b)-17] = 0x80; return b }},
		{"delivered_no_name", "delivered", func(b []byte) []byte { b[12] = 16; return b[:48] }},
	} {
		found := false
		for _, f := range append(handshakeOf(t), frames...) {
			if f.Name == m.of {
				b, err := hex.DecodeString(f.Hex)
				check(t, err)
				out, found = append(out, badVector{m.name, hex.EncodeToString(changed(f.Kind, b, m.change))}), true
			}
		}
		if !found {
			t.Fatalf("no frame %q", m.of)
		}
	}
	return out
}

// changed changes a frame whose payload has no tag meanwhile, and then one of zeros.
func changed(k kind, b []byte, change func(b []byte) []byte) []byte {
	if len(b) == headerBytes || k == kindBlocks || k == 0 {
		return change(b)
	}
	le.PutUint32(b[12:], le.Uint32(b[12:])-macBytes)
	b = change(b[:len(b)-macBytes])
	le.PutUint32(b[12:], le.Uint32(b[12:])+macBytes)
	return append(b, make([]byte, macBytes)...)
}

func handshakeOf(*testing.T) []vector {
	h := hello{low: version, high: version, timeout: 2 * time.Second}
	ch := challenge{version: version, timeout: 3 * time.Second}
	frame := func(name string, k kind, payload []byte) vector {
		b := make([]byte, headerBytes)
		(&header{kind: k, length: uint32(len(payload))}).put(b)
		return vector{Name: name, Hex: hex.EncodeToString(slices.Concat(b, payload))}
	}
	return []vector{frame("hello", kindHello, h.encode()), frame("challenge", kindChallenge, ch.encode())}
}

// parseFrame decodes a frame but its MAC, and encodes the payload again.
func parseFrame(b []byte) (again []byte, err error) {
	if len(b) < headerBytes {
		return nil, malformed("cut off")
	}
	h, err := parseHeader(b)
	if err != nil {
		return nil, err
	}
	p := b[headerBytes:]
	if int64(h.length) != int64(len(p)) {
		return nil, malformed("cut off")
	}
	again = make([]byte, headerBytes)
	h.put(again)
	copy(again[macAt:], b[macAt:headerBytes])
	switch h.kind {
	case kindHello:
		m, err := parseHello(p)
		return slices.Concat(again, m.encode()), err
	case kindChallenge:
		m, err := parseChallenge(p)
		return slices.Concat(again, m.encode()), err
	case kindProof:
		return slices.Concat(again, p), nil
	}
	return parsePayload(h.kind, p, again)
}

// parsePayload decodes the payload of a frame with tags but these, and encodes it again.
func parsePayload(k kind, p, again []byte) ([]byte, error) {
	if len(p) == 0 {
		return again, nil
	}
	if len(p) <= macBytes {
		return nil, malformed("cut off")
	}
	n := len(p) - macBytes
	if k == kindBlocks {
		if n < tableBytes || n < tableBytes+int(le.Uint16(p))*rowBytes {
			return nil, malformed("cut off")
		}
		n = tableBytes + int(le.Uint16(p))*rowBytes
	}
	p, tags := p[:n], p[n:]
	var err error
	switch k {
	case kindSubscribe:
		var m subscribe
		m, err = parseSubscribe(p)
		again = append(again, m.encode()...)
	case kindHave:
		var runs []run
		runs, err = parseHave(p)
		again = append(again, encodeHave(runs)...)
	case kindEnd:
		var e End
		var tokens uint32
		e, tokens, err = parseEnd(p)
		again = append(again, encodeEnd(e, tokens)...)
	case kindGet, kindPin:
		var m get
		m, err = parseGet(p)
		again = m.encode(again)
	case kindPlaces:
		var m places
		m, err = parsePlaces(p)
		again = append(again, m.encode()...)
	case kindBlocks:
		var rows []row
		rows, err = parseTable(p, nil)
		again = encodeTable(again, rows)
	case kindDelivered:
		var m delivered
		m, err = parseDelivered(p)
		again = append(again, m.encode()...)
	default:
		again = append(again, p...)
	}
	return append(again, tags...), err
}

// TestVectors: the frames are those of testdata/wire/peer.json, and those that are malformed are
// refused.
func TestVectors(t *testing.T) {
	v := makeVectors(t)
	text, err := json.MarshalIndent(v, "", " ")
	check(t, err)
	text = append(text, '\n')
	if *update {
		check(t, os.WriteFile(vectorsFile, text, 0o644))
	}
	if want, err := os.ReadFile(vectorsFile); err != nil || !bytes.Equal(text, want) {
		t.Errorf("the frames are not those of %s (%v): "+
			"go test ./pool/peer -run Vectors -update shows the difference", vectorsFile, err)
	}
	for _, f := range append(v.Handshake, v.Frames...) {
		b, err := hex.DecodeString(f.Hex)
		check(t, err)
		if again, err := parseFrame(b); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%s: %v\n%x\nis encoded again as\n%x", f.Name, err, b, again)
		}
	}
	for _, m := range v.Malformed {
		b, err := hex.DecodeString(m.Hex)
		check(t, err)
		if again, err := parseFrame(b); err == nil {
			t.Errorf("%s was taken, as %x", m.Name, again)
		}
	}
}

// FuzzFrame checks that what is decoded is encoded to the same bytes again.
func FuzzFrame(f *testing.F) {
	text, err := os.ReadFile(vectorsFile)
	if err != nil {
		f.Fatal(err)
	}
	var v vectors
	if err := json.Unmarshal(text, &v); err != nil {
		f.Fatal(err)
	}
	for _, all := range [][]vector{v.Handshake, v.Frames} {
		for _, one := range all {
			b, _ := hex.DecodeString(one.Hex)
			f.Add(b)
		}
	}
	for _, one := range v.Malformed {
		b, _ := hex.DecodeString(one.Hex)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if again, err := parseFrame(b); err == nil && !bytes.Equal(again, b) {
			t.Errorf("%x\nis encoded again as\n%x", b, again)
		}
	})
}
