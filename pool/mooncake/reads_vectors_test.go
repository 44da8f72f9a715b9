package mooncake

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

const readsVectorsFile = "../../testdata/wire/mooncake_reads.json"

func makeReadsVectors() (v vectors) {
	o := ReadsOptions{
		Protocol: "rdma", Devices: "mlx5_0,mlx5_1", Host: "node-1", Concurrency: 8,
		Arena: Memory{Base: make([]byte, 1<<16)},
	}
	for _, f := range []struct {
		name, from string
		frame      []byte
		value      any
	}{
		{"hello", "agent", encode(o.hello()), []any{wireVersion, "node-1", "rdma", "mlx5_0,mlx5_1", 8, 1 << 16}},
		{"read", "agent", encode(pullsFrame(300, "node-2:15000", []pool.Pull{
			{Offset: 4096, Length: 512, Address: 0x7f0000001000}, {Length: 1 << 33, Address: 1},
		})),
			[]any{300, "node-2:15000", []any{[]any{4096, 0x7f0000001000, 512}, []any{0, 1, 1 << 33}}}},
		{"welcome", "helper", encode(&readsWelcome{wireVersion, "", "node-1:15001", 0x7f0000000000}),
			[]any{wireVersion, "", "node-1:15001", 0x7f0000000000}},
		{"refusal", "helper", encode(&readsWelcome{Version: wireVersion, Reason: "no RDMA device"}),
			[]any{wireVersion, "no RDMA device", "", 0}},
		{"reply", "helper", encode(&reply{300, []int64{-1}}), []any{300, []any{-1}}},
	} {
		v.Frames = append(v.Frames, vector{f.name, f.from, f.value, frameHex(f.frame)})
	}
	for name, text := range map[string]string{
		"welcome_nothing": "", "welcome_three_parts": "9301a0a0", "welcome_version_1": "9401a0a000",
		"welcome_negative": "9401a0a0ff", "welcome_long_form": "9401a0a0cd0001", "welcome_more": "9401a0a00000",
	} {
		v.Malformed = append(v.Malformed, vector{Name: name, From: "helper", Hex: text})
	}
	for name, text := range map[string]string{
		"request_two_parts": "9201a161", "request_no_target": "9301a090", "request_text_id": "93a131a16190",
		"request_long_form": "93cd0001a16190", "request_more": "9301a1619000",
	} {
		v.Malformed = append(v.Malformed, vector{Name: name, From: "agent", Hex: text})
	}
	slices.SortFunc(v.Malformed, func(a, b vector) int { return bytes.Compare([]byte(a.Name), []byte(b.Name)) })
	return v
}

// TestReadsVectors expects the frames of both sides to be those of the file, which the helper's
// tests also read.
func TestReadsVectors(t *testing.T) {
	v := makeReadsVectors()
	text, err := json.MarshalIndent(v, "", " ")
	check(t, err)
	text = append(text, '\n')
	if *update {
		check(t, os.WriteFile(readsVectorsFile, text, 0o644))
	}
	if want, err := os.ReadFile(readsVectorsFile); err != nil || !bytes.Equal(text, want) {
		t.Errorf("the frames are not those of %s (%v): "+
			"go test ./pool/mooncake -run ReadsVectors -update shows the difference", readsVectorsFile, err)
	}
	for _, f := range v.Frames {
		b := unhex(t, f.Hex)
		if w, err := decodeReadsWelcome(b); (err == nil) != (f.Name == "welcome") ||
			err == nil && !bytes.Equal(encode(&w)[4:], b) {
			t.Errorf("%s: %+v, %v", f.Name, w, err)
		}
	}
	for _, f := range v.Malformed {
		if w, err := decodeReadsWelcome(unhex(t, f.Hex)); err == nil {
			t.Errorf("%s is a welcome: %+v", f.Name, w)
		}
	}
}
