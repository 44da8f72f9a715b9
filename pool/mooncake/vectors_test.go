package mooncake

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"slices"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/wire/mooncake.json anew")

const vectorsFile = "../../testdata/wire/mooncake.json"

// vector is a frame without its length: the msgpack array, as JSON and as bytes.
type vector struct {
	Name  string `json:"name"`
	From  string `json:"from"` // agent or helper
	Value any    `json:"value,omitempty"`
	Hex   string `json:"hex"`
}

type vectors struct {
	Frames    []vector `json:"frames"`
	Malformed []vector `json:"malformed"`
}

// text of bytes that must end with a length in front.
func frameHex(b []byte) string { return hex.EncodeToString(b[4:]) }

func helloOf(t *testing.T, o Options) []byte {
	t.Helper()
	if err := o.complete(); err != nil {
		t.Fatal(err)
	}
	return encode(o.hello("node-1"))
}

func makeVectors(t *testing.T) (v vectors) {
	all := Options{
		Master: "etcd://a:1;b:2", Metadata: "http://m:8080/metadata", Protocol: "rdma", Devices: "mlx5_0,mlx5_1",
		Segment: 64 << 30, LocalBuffer: 32 << 20, Replicas: 2,
		Bounce: 128 << 20, Concurrency: 64,
		Arena: Memory{Base: make([]byte, 1<<16)},
	}
	welcomed := func(reason, name string) []byte { return encode(&welcome{wireVersion, reason, name}) }
	replied := func(id uint64, codes ...int64) []byte { return encode(&reply{id, codes}) }
	for _, f := range []struct {
		name, from string
		frame      []byte
		value      any
	}{
		{"hello", "agent", helloOf(t, Options{Master: "h:50051"}),
			[]any{wireVersion, []any{"node-1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "h:50051", 1, 8}, 64 << 20,
				0}},
		{"hello_all", "agent", helloOf(t, all), []any{wireVersion, []any{
			"node-1", "http://m:8080/metadata", 64 << 30, 32 << 20, "rdma", "mlx5_0,mlx5_1", "etcd://a:1;b:2", 2, 64,
		}, 128 << 20, 1 << 16}},
		{"put", "agent", encode(&transferRequest{1, opPut, []place{{Key: "kvagent:a", Offset: 4096}}}),
			[]any{1, 1, []any{[]any{"kvagent:a", 0, 4096, 0}}}},
		{"get", "agent", encode(&transferRequest{300, opGet,
			[]place{{"k", areaArena, 1 << 20, 10}, {"l", areaBounce, 1 << 33, 1 << 32}}}),
			[]any{300, 2, []any{[]any{"k", 1, 1 << 20, 10}, []any{"l", 0, 1 << 33, 1 << 32}}}},
		{"exists", "agent", encode(&keysRequest{70000, opExists, []string{"a", "b"}}),
			[]any{70000, 3, []any{"a", "b"}}},
		{"delete", "agent", encode(&keysRequest{1 << 40, opDelete, []string{"a"}}), []any{1 << 40, 4, []any{"a"}}},
		{"welcome", "helper", welcomed("", "node-1:14000"), []any{wireVersion, "", "node-1:14000"}},
		{"refusal", "helper", welcomed("OSError: no master", ""), []any{wireVersion, "OSError: no master", ""}},
		{"reply", "helper", replied(300, 10, codeNotFound, 1<<33), []any{300, []any{10, codeNotFound, 1 << 33}}},
		{"reply_errors", "helper", replied(1, 0, 1, -1, -33, -200, -1700), []any{1, []any{0, 1, -1, -33, -200, -1700}}},
	} {
		v.Frames = append(v.Frames, vector{f.name, f.from, f.value, frameHex(f.frame)})
	}
	for name, text := range map[string]string{
		"nothing": "", "cut": "92cd01", "three_parts": "93010100", "no_codes": "920190", "long_form": "92cd00019100",
		"negative_id": "92ff9100", "other_version": "9301a0a0", "more_behind": "9201910000", "text_code": "920191a130",
	} {
		v.Malformed = append(v.Malformed, vector{Name: "reply_" + name, From: "helper", Hex: text})
	}
	for name, text := range map[string]string{
		"two_parts": "920103", "operation_0": "93010091a161", "operation_5": "93010591a161",
		"text_id": "93a1310391a161", "long_form": "93cd00010391a161", "more_behind": "93010391a16100",
	} {
		v.Malformed = append(v.Malformed, vector{Name: "request_" + name, From: "agent", Hex: text})
	}
	slices.SortFunc(v.Malformed, func(a, b vector) int { return bytes.Compare([]byte(a.Name), []byte(b.Name)) })
	return v
}

// TestVectors expects the frames of both sides to be those of testdata/wire/mooncake.json, which
// the helper's tests also read.
func TestVectors(t *testing.T) {
	v := makeVectors(t)
	text, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, '\n')
	if *update {
		if err := os.WriteFile(vectorsFile, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(vectorsFile); err != nil || !bytes.Equal(text, want) {
		t.Errorf("the frames are not those of %s (%v): "+
			"go test ./pool/mooncake -run Vectors -update shows the difference", vectorsFile, err)
	}
	for _, f := range v.Frames {
		b := unhex(t, f.Hex)
		switch {
		case f.From == "agent":
		case f.Name == "welcome" || f.Name == "refusal":
			value := f.Value.([]any)
			if w, err := decode[welcome](b); err != nil || w.Reason != value[1] || w.Name != value[2] {
				t.Errorf("%s: %+v, %v", f.Name, w, err)
			}
		default:
			if r, err := decodeReply(b); err != nil || !bytes.Equal(encode(&r)[4:], b) ||
				len(r.Codes) != len(f.Value.([]any)[1].([]any)) {
				t.Errorf("%s: %+v, %v", f.Name, r, err)
			}
		}
	}
	for _, f := range v.Malformed {
		b := unhex(t, f.Hex)
		if r, err := decodeReply(b); f.From == "helper" && err == nil {
			t.Errorf("%s is a reply: %+v", f.Name, r)
		}
		if w, err := decode[welcome](b); err == nil && checkWelcome(w.Version, "") == nil {
			t.Errorf("%s is a welcome: %+v", f.Name, w)
		}
	}
}
