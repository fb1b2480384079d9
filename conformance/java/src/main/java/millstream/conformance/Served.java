package millstream.conformance;

import java.util.HashMap;
import java.util.Map;
import millstream.conformance.Api.Need;

/** What the broker returned for ApiVersions, as the driver read it: {@code key:oldest-newest,...}. */
public final class Served {
    private final Map<Integer, Integer> oldest = new HashMap<>();
    private final Map<Integer, Integer> newest = new HashMap<>();

    Served(String reported) {
        for (String part : reported.split(",")) {
            String[] keyAndRange = part.split(":");
            String[] range = keyAndRange[1].split("-");
            oldest.put(Integer.valueOf(keyAndRange[0]), Integer.valueOf(range[0]));
            newest.put(Integer.valueOf(keyAndRange[0]), Integer.valueOf(range[1]));
        }
    }

    /** Whether a check that needs this can be run. */
    boolean has(Need need) {
        return newest.getOrDefault(need.api().key, -1) >= need.version();
    }

    /** Whether the API is served at all. */
    public boolean has(int key) {
        return newest.containsKey(key);
    }

    /** Whether a client that knows these versions of an API finds one that is served. */
    public boolean overlaps(int key, int from, int to) {
        return oldest.get(key) <= to && from <= newest.get(key);
    }
}
