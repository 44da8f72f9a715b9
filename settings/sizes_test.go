package settings

import "testing"

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{"4GiB": 4 << 30, "512 MiB": 512 << 20, "0": 0, "1048576": 1 << 20,
		"1.5KiB": 1536, "7B": 7} {
		got, err := ParseSize(text)
		if err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", text, got, err, want)
		}
		if back, err := ParseSize(FormatSize(got)); err != nil || back != got {
			t.Errorf("%q is written as %q", text, FormatSize(got))
		}
	}
	for _, text := range []string{"", "GiB", "-1", "1GB", "1e40", "nan", "0x10"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q is taken as %d", text, got)
		}
	}
}
